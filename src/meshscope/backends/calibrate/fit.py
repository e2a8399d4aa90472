"""Fits the constants of a chip to timed collectives: one line per kind and group size.

Every second size is held out to estimate the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median

from meshscope.analysis.samples import LineFit, TimedCollective, fit_line, spread_of
from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.interconnect.constants import (
    KindRates,
    LinkConstants,
    MeasuredRange,
    RateConstants,
    Spreads,
    constants_of,
    spec_constants,
)
from meshscope.hardware.interconnect.lines import collective_lines
from meshscope.hardware.interconnect.profile import FittedKind
from meshscope.hardware.interconnect.strategies import geometry_of
from meshscope.hardware.topology import Topology

Points = Sequence[TimedCollective]
Key = tuple[Kind, int]  # kind and group size
ByKey = dict[Key, list[TimedCollective]]

MIN_POINTS = 6  # per kind and group size; with fewer, all kinds share one line
SMALL_BYTES = 1 << 16  # latency dominates the time of smaller payloads


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Constants, and the quality of each fit."""

    constants: LinkConstants
    fits: tuple[FittedKind, ...]


def fit_constants(points: Points, topology: Topology, *, source: str) -> Fitted:
    """Fits constants to the points of one chip; SpecError for too few points or a negative latency.

    Within a kind and group size, every second size is held out. A few points, such as published
    ones, share one line without held-out sizes.
    """
    if not points:
        raise SpecError("there are no points to fit. Measure, or give points of this chip.")
    base = _base(topology)
    by_key: ByKey = {}
    for point in points:
        by_key.setdefault((point.kind, point.group_size), []).append(point)
    if min(map(len, by_key.values())) < MIN_POINTS:
        return _fitted_together(points, by_key, topology, base, source)
    lines: dict[Key, LineFit] = {}
    errors: dict[Key, list[tuple[bool, float]]] = {}
    for key, of_key in by_key.items():
        ordered = sorted(of_key, key=lambda point: point.payload_bytes)
        lines[key], errors[key] = _fit_with_holdout(ordered, topology, base)
    # The fastest line sets the memory bandwidth; the efficiency of the others is relative to it.
    rate = max(1 / line.inverse_bandwidth for line in lines.values())
    has_peak = base.memory_bytes_per_s is not None
    peak = rate if has_peak else 1.0
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
    constants = replace(
        base,
        memory_bytes_per_s=peak if has_peak else None,
        hop_s=0.0,  # the latency of each group size includes its hops
        rates=RateConstants(
            latency_s=median(fitted.rates.latency_s for fitted in by_kind),
            efficiency=median(fitted.rates.efficiency for fitted in by_kind),
        ),
        by_kind=by_kind,
        measured=_ranges(by_key),
        source=source,
        spreads=_spreads(errors, lines, by_key, topology, base),
    )
    fits = tuple(_fitted_kind(key, line, errors[key]) for key, line in lines.items())
    return Fitted(constants=constants, fits=fits)


def unfitted(topology: Topology, *, source: str) -> Fitted:
    """The chip's constants, for a single device, which has no collectives."""
    is_cpu = topology.chip.kind is ChipKind.CPU
    constants = _base(topology) if is_cpu else constants_of(topology.chip)
    origin = source if is_cpu else f"{source}; collectives: {constants.source}"
    return Fitted(constants=replace(constants, source=origin), fits=())


def _fitted_together(
    points: Points, by_key: ByKey, topology: Topology, base: LinkConstants, source: str
) -> Fitted:
    """One latency, the median of small collectives, and one bandwidth, fitted to the others."""
    work = [_work(point, topology, base) for point in points]
    if all(map(_is_small, points)):
        raise SpecError(
            f"{len(points)} points, all below {SMALL_BYTES} B, cannot fit a bandwidth. "
            "Add larger payloads."
        )
    has_peak = topology.chip.kind is not ChipKind.CPU  # the work of CPUs is bytes, not seconds
    small: list[float] = []
    large: list[tuple[float, float]] = []
    for point, s in zip(points, work, strict=True):
        if not _is_small(point):
            large.append((s, point.seconds))
            continue
        geometry = geometry_of(topology, point.groups)
        hops_s = (line.hops_s for line in collective_lines(point.kind, geometry, base))
        small.append(point.seconds - (max(s, min(hops_s, default=0.0)) if has_peak else 0.0))
    latency_s = median(small) if small else constants_of(topology.chip).rates.latency_s
    if not small:
        source = f"{source}; latency of the published constants"
    if latency_s < 0:
        raise SpecError(
            f"small collectives are {-latency_s:.3g} s faster than the published peak allows. "
            "Check topology and plan: the groups may differ."
        )
    line = fit_line(
        [s for s, _ in large],
        [seconds for _, seconds in large],
        name=f"collectives of {topology.chip.name}",
        latency_s=latency_s,
    )
    errors = [
        log((latency_s + line.inverse_bandwidth * s) / point.seconds)
        for point, s in zip(points, work, strict=True)
    ]
    peak = None if base.memory_bytes_per_s is None else 1 / line.inverse_bandwidth
    constants = replace(
        base,
        memory_bytes_per_s=peak,
        rates=RateConstants(
            latency_s=latency_s, efficiency=1.0 if peak else 1 / line.inverse_bandwidth
        ),
        measured=_ranges(by_key),
        source=source,
    )
    together = replace(line, log_errors=tuple(errors))
    return Fitted(constants=constants, fits=(_fitted_kind((None, 0), together, []),))


def _is_small(point: TimedCollective) -> bool:
    return point.payload_bytes < SMALL_BYTES


def _base(topology: Topology) -> LinkConstants:
    """Published peaks to correct; for CPUs, a memory of one byte per second."""
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
    """Seconds of the bytes at the published peak; for CPUs, the bytes moved."""
    lines = collective_lines(point.kind, geometry_of(topology, point.groups), base)
    return point.payload_bytes * min((line.s_per_byte for line in lines), default=0.0)


def _fit_with_holdout(
    points: Points, topology: Topology, base: LinkConstants
) -> tuple[LineFit, list[tuple[bool, float]]]:
    """The line, and (is short, ln error) of every held-out point."""
    fitted, held_out = points[::2], points[1::2]
    first = points[0]
    line = fit_line(
        [_work(point, topology, base) for point in fitted],
        [point.seconds for point in fitted],
        name=f"{first.kind} over groups of {first.group_size}",
    )
    errors: list[tuple[bool, float]] = []
    for point in held_out:
        bytes_s = line.inverse_bandwidth * _work(point, topology, base)
        error = log((line.latency_s + bytes_s) / point.seconds)
        errors.append((bytes_s < line.latency_s, error))
    return line, errors


def _ranges(by_key: ByKey) -> tuple[MeasuredRange, ...]:
    return tuple(
        MeasuredRange(
            kind=kind,
            min_payload_bytes=min(point.payload_bytes for point in points),
            max_payload_bytes=max(point.payload_bytes for point in points),
            min_group_size=group_size,
            max_group_size=group_size,
        )
        for (kind, group_size), points in by_key.items()
    )


def _spreads(
    errors: dict[Key, list[tuple[bool, float]]],
    lines: dict[Key, LineFit],
    by_key: ByKey,
    topology: Topology,
    base: LinkConstants,
) -> Spreads | None:
    """Error intervals from held-out sizes; for unmeasured kinds, from predicting each by the others."""
    held_out = [pair for pairs in errors.values() for pair in pairs]
    short = [error for is_short, error in held_out if is_short]
    long = [error for is_short, error in held_out if not is_short]
    out_of_sample: list[float] = []
    for key in lines:
        others = [line for other, line in lines.items() if other != key]
        if others:
            latency_s = median(line.latency_s for line in others)
            inverse_bandwidth = median(line.inverse_bandwidth for line in others)
            out_of_sample += [
                log((latency_s + inverse_bandwidth * _work(point, topology, base)) / point.seconds)
                for point in by_key[key]
            ]
    if not held_out or not out_of_sample:
        return None
    return Spreads(
        short=spread_of(short or [error for _, error in held_out]),
        n_short=len(short),
        long=spread_of(long or [error for _, error in held_out]),
        n_long=len(long),
        out_of_sample=spread_of(out_of_sample),
        n_out_of_sample=len(out_of_sample),
    )


def _fitted_kind(
    key: tuple[Kind | None, int], line: LineFit, errors: list[tuple[bool, float]]
) -> FittedKind:
    kind, group_size = key
    log_errors = [*map(abs, line.log_errors), *(abs(error) for _, error in errors)]
    return FittedKind(
        kind=kind,
        group_size=group_size,
        latency_s=line.latency_s,
        inverse_bandwidth=line.inverse_bandwidth,
        n_fitted=len(line.log_errors),
        n_holdout=len(errors),
        median_error_frac=median(log_errors),
        largest_error_frac=max(log_errors),
    )
