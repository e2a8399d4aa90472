"""From timed collectives to the constants of a chip: one line a kind and size of group, judged on held-out sizes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.interconnect.constants import (
    KindRates,
    LinkConstants,
    MeasuredRange,
    RateConstants,
    Spreads,
    constants_of,
    spec_constants,
)
from meshscope.interconnect.fitting import LineFit, fit_line, spread_of
from meshscope.interconnect.geometry import geometry_of
from meshscope.interconnect.lines import collective_lines
from meshscope.interconnect.profile import FittedKind
from meshscope.interconnect.samples import TimedCollective
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology

Points = Sequence[TimedCollective]

FEW = 6  # points of a kind and size of group: fewer are fitted together with the others
SMALL_BYTES = 1 << 16  # below, a time tells of the floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Constants, and how each fit came out."""

    constants: LinkConstants
    fits: tuple[FittedKind, ...]


def fit_constants(points: Points, topology: Topology, *, source: str) -> Fitted:
    """The constants that the points of one chip tell; SpecError for too few points or a negative line.

    In each kind and size of group every second size judges. Points that are few, as published ones
    are, make one line for all kinds, and nothing judges it.
    """
    if not points:
        raise SpecError("there is not one point to fit. Measure, or give points of this chip.")
    base = _base(topology)
    counts = Counter((point.kind, point.group_size) for point in points)
    if min(counts.values()) < FEW:
        return _fitted_together(points, topology, base, source)
    lines: dict[tuple[Kind, int], LineFit] = {}
    errors: dict[tuple[Kind, int], list[tuple[bool, float]]] = {}
    for key in dict.fromkeys((point.kind, point.group_size) for point in points):
        own = sorted(
            (point for point in points if (point.kind, point.group_size) == key),
            key=lambda point: point.payload_bytes,
        )
        lines[key], errors[key] = _fitted_and_judged(own, topology, base)
    constants = _constants(base, lines, points, source)
    return Fitted(
        constants=replace(constants, spreads=_spreads(errors, lines, points, topology, base)),
        fits=tuple(_told(key, line, errors[key]) for key, line in lines.items()),
    )


def unfitted(topology: Topology, *, source: str) -> Fitted:
    """The constants of one device, which has no collectives: those of its chip, fitted elsewhere."""
    is_cpu = topology.chip.kind is ChipKind.CPU
    constants = _base(topology) if is_cpu else constants_of(topology.chip)
    words = source if is_cpu else f"{source}; collectives: {constants.source}"
    return Fitted(constants=replace(constants, source=words), fits=())


def _fitted_together(
    points: Points, topology: Topology, base: LinkConstants, source: str
) -> Fitted:
    """One floor, the median of what small collectives take, and one rate, through the others."""
    work = [_work(point, topology, base) for point in points]
    if all(map(_is_small, points)):
        raise SpecError(
            f"{len(points)} points, all below {SMALL_BYTES} B, are too few to fit a rate. "
            "Give large ones, too."
        )
    timed = list(zip(points, work, strict=True))
    small = [point.seconds - own for point, own in timed if _is_small(point)]
    large = [(own, point.seconds) for point, own in timed if not _is_small(point)]
    latency_s = median(small) if small else _published_floor_s(topology)
    if not small:
        source = f"{source}; no small ones, floor of the published"
    if latency_s < 0:
        raise SpecError(
            f"small collectives take {-latency_s:.3g} s less than their bytes do at the published peak. "
            "Check the topology and the plan: the groups may be others."
        )
    line = fit_line(
        [own for own, _ in large],
        [seconds for _, seconds in large],
        name=f"collectives of {topology.chip.name}",
        latency_s=latency_s,
    )
    errors = [
        log((latency_s + line.inverse_bandwidth * own) / point.seconds)
        for point, own in zip(points, work, strict=True)
    ]
    peak = None if base.memory_bytes_per_s is None else 1 / line.inverse_bandwidth
    constants = replace(
        base,
        memory_bytes_per_s=peak,
        rates=RateConstants(
            latency_s=latency_s, efficiency=1.0 if peak else 1 / line.inverse_bandwidth
        ),
        measured=_ranges(points),
        source=source,
    )
    together = replace(line, log_errors=tuple(errors))
    return Fitted(constants=constants, fits=(_told((None, 0), together, []),))


def _is_small(point: TimedCollective) -> bool:
    return point.payload_bytes < SMALL_BYTES


def _published_floor_s(topology: Topology) -> float:
    """SpecError for a chip of which nobody published anything."""
    return constants_of(topology.chip).rates.latency_s


def _base(topology: Topology) -> LinkConstants:
    """Peaks to be corrected; where nobody published any, a memory that moves one byte a second."""
    if topology.chip.kind is not ChipKind.CPU:
        return spec_constants(topology.chip)
    return LinkConstants(
        chip=topology.chip.name,
        link_bytes_per_s=None,
        links_at_once=None,
        die_bytes_per_s=None,
        host_bytes_per_s=None,
        memory_bytes_per_s=1.0,
        hop_s=0.0,
        rates=RateConstants(latency_s=0.0, efficiency=1.0),
    )


def _work(point: TimedCollective, topology: Topology, base: LinkConstants) -> float:
    """Seconds of the bytes at the published peak; bytes moved, where a memory is shared."""
    lines = collective_lines(point.kind, geometry_of(topology, point.groups), base)
    return point.payload_bytes * min((line.s_per_byte for line in lines), default=0.0)


def _fitted_and_judged(
    own: Points, topology: Topology, base: LinkConstants
) -> tuple[LineFit, list[tuple[bool, float]]]:
    """The line, and (is short, ln error) of every point that judges it."""
    fitted, judging = own[::2], own[1::2]
    first = own[0]
    line = fit_line(
        [_work(point, topology, base) for point in fitted],
        [point.seconds for point in fitted],
        name=f"{first.kind} over groups of {first.group_size}",
    )
    errors: list[tuple[bool, float]] = []
    for point in judging:
        bytes_s = line.inverse_bandwidth * _work(point, topology, base)
        error = log((line.latency_s + bytes_s) / point.seconds)
        errors.append((bytes_s < line.latency_s, error))
    return line, errors


def _constants(
    base: LinkConstants, lines: dict[tuple[Kind, int], LineFit], points: Points, source: str
) -> LinkConstants:
    # The fastest line is the memory's rate, of which the others reach a share.
    rate = max(1 / line.inverse_bandwidth for line in lines.values())
    peak = rate if base.memory_bytes_per_s is not None else 1.0
    by_kind = tuple(
        KindRates(
            kind=kind,
            group_size=group_size,
            rates=RateConstants(
                latency_s=line.latency_s, efficiency=1 / line.inverse_bandwidth / peak
            ),
        )
        for (kind, group_size), line in lines.items()
    )
    return replace(
        base,
        memory_bytes_per_s=None if base.memory_bytes_per_s is None else peak,
        hop_s=0.0 if base.memory_bytes_per_s is not None else base.hop_s,
        rates=RateConstants(
            latency_s=median(own.rates.latency_s for own in by_kind),
            efficiency=median(own.rates.efficiency for own in by_kind),
        ),
        by_kind=by_kind,
        measured=_ranges(points),
        source=source,
    )


def _ranges(points: Points) -> tuple[MeasuredRange, ...]:
    """One a kind and size of group: between sizes of groups nothing was measured."""
    found: list[MeasuredRange] = []
    for kind, group_size in dict.fromkeys((point.kind, point.group_size) for point in points):
        payloads = [
            point.payload_bytes
            for point in points
            if (point.kind, point.group_size) == (kind, group_size)
        ]
        found.append(
            MeasuredRange(
                kind=kind,
                min_payload_bytes=min(payloads),
                max_payload_bytes=max(payloads),
                min_group_size=group_size,
                max_group_size=group_size,
            )
        )
    return tuple(found)


def _spreads(
    errors: dict[tuple[Kind, int], list[tuple[bool, float]]],
    lines: dict[tuple[Kind, int], LineFit],
    points: Points,
    topology: Topology,
    base: LinkConstants,
) -> Spreads | None:
    """Intervals from held-out sizes; for what was not measured, from kinds judged by the other kinds."""
    held = [pair for own in errors.values() for pair in own]
    short = [error for is_short, error in held if is_short]
    long = [error for is_short, error in held if not is_short]
    unseen: list[float] = []
    for key in lines:
        others = [line for other, line in lines.items() if other != key]
        if others:
            latency_s = median(line.latency_s for line in others)
            slowness = median(line.inverse_bandwidth for line in others)
            unseen += [
                log((latency_s + slowness * _work(point, topology, base)) / point.seconds)
                for point in points
                if (point.kind, point.group_size) == key
            ]
    if not held or not unseen:
        return None
    return Spreads(
        short=spread_of(short or [error for _, error in held]),
        n_short=len(short),
        long=spread_of(long or [error for _, error in held]),
        n_long=len(long),
        out_of_sample=spread_of(unseen),
        n_out_of_sample=len(unseen),
    )


def _told(
    key: tuple[Kind | None, int], line: LineFit, errors: list[tuple[bool, float]]
) -> FittedKind:
    kind, group_size = key
    every = [abs(error) for error in line.log_errors] + [abs(error) for _, error in errors]
    return FittedKind(
        kind=kind,
        group_size=group_size,
        latency_s=line.latency_s,
        inverse_bandwidth=line.inverse_bandwidth,
        n_fitted=len(line.log_errors),
        n_holdout=len(errors),
        median_error_frac=median(every),
        largest_error_frac=max(every),
    )
