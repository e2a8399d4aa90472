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
Errors = list[tuple[bool, float]]  # of held-out points: whether latency dominates, and ln error
# Seconds of the bytes of each point at the published peak; for CPUs, the bytes moved.
Work = dict[TimedCollective, float]

MIN_POINTS = 6  # per kind and group size
SMALL_BYTES = 1 << 16  # latency dominates the time of smaller payloads


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Constants, and the quality of each fit."""

    constants: LinkConstants
    fits: tuple[FittedKind, ...]


def fit_constants(points: Points, topology: Topology, *, source: str) -> Fitted:
    """Fits constants to the points of one chip; SpecError for too few points or a negative latency.

    Within a kind and group size, every second size is held out. A single device has no collectives to fit.
    """
    if not points and topology.n_devices == 1:
        is_cpu = topology.chip.kind is ChipKind.CPU
        constants = _base(topology) if is_cpu else constants_of(topology.chip)
        origin = source if is_cpu else f"{source}; collectives: {constants.source}"
        return Fitted(constants=replace(constants, source=origin), fits=())
    if not points:
        raise SpecError("there are no points to fit. Measure, or give points of this chip.")
    base = _base(topology)
    work = {point: _work(point, topology, base) for point in points}
    by_key: ByKey = {}
    for point in points:
        by_key.setdefault((point.kind, point.group_size), []).append(point)
    base = replace(base, measured=_ranges(by_key), source=source)
    if (n_least := min(map(len, by_key.values()))) < MIN_POINTS:
        raise SpecError(
            f"{n_least} sizes of a collective are too few for a line and its error, which take {MIN_POINTS}. Use a "
            "larger --budget or --max-bytes."
        )
    lines: dict[Key, LineFit] = {}
    errors: dict[Key, Errors] = {}
    for key, of_key in by_key.items():
        lines[key], errors[key] = _fit_with_holdout(of_key, work)
    # The fastest line sets the memory bandwidth; the efficiency of the others is relative to it.
    rate = max(1 / line.inverse_bandwidth for line in lines.values())
    has_peak = base.memory_bytes_per_s is not None
    peak = rate if has_peak else 1.0
    by_kind: list[KindRates] = []
    for (kind, group_size), line in lines.items():
        efficiency = 1 / line.inverse_bandwidth / peak
        rates = RateConstants(latency_s=line.latency_s, efficiency=efficiency)
        by_kind.append(KindRates(kind=kind, group_size=group_size, rates=rates))
    constants = replace(
        base,
        memory_bytes_per_s=peak if has_peak else None,
        hop_s=0.0,  # the latency of each group size includes its hops
        rates=RateConstants(
            latency_s=median(fitted.rates.latency_s for fitted in by_kind),
            efficiency=median(fitted.rates.efficiency for fitted in by_kind),
        ),
        by_kind=tuple(by_kind),
        spreads=_spreads(errors, lines, by_key, work),
    )
    fits = tuple(_fitted_kind(key, line, errors[key]) for key, line in lines.items())
    return Fitted(constants=constants, fits=fits)


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
    lines = collective_lines(point.kind, geometry_of(topology, point.groups), base)
    return point.payload_bytes * min((line.s_per_byte for line in lines), default=0.0)


def _fit_with_holdout(points: Points, work: Work) -> tuple[LineFit, Errors]:
    """The line of every second size, and the errors of the other ones."""
    ordered = sorted(points, key=lambda point: point.payload_bytes)
    fitted, held_out = ordered[::2], ordered[1::2]
    line = fit_line(
        [work[point] for point in fitted],
        [point.seconds for point in fitted],
        name=f"{ordered[0].kind} over groups of {ordered[0].group_size}",
    )
    errors: Errors = []
    for point in held_out:
        bytes_s = line.inverse_bandwidth * work[point]
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
    errors: dict[Key, Errors], lines: dict[Key, LineFit], by_key: ByKey, work: Work
) -> Spreads | None:
    """Error intervals from held-out sizes; for unmeasured kinds, from predicting each by the others."""
    held_out = [pair for pairs in errors.values() for pair in pairs]
    short = [error for is_short, error in held_out if is_short]
    long = [error for is_short, error in held_out if not is_short]
    every = [error for _, error in held_out]
    out_of_sample: list[float] = []
    for key in lines if len(lines) > 1 else ():
        others = [line for other, line in lines.items() if other != key]
        latency_s = median(line.latency_s for line in others)
        slope = median(line.inverse_bandwidth for line in others)
        out_of_sample += [log((latency_s + slope * work[p]) / p.seconds) for p in by_key[key]]
    if not held_out or not out_of_sample:
        return None
    return Spreads(
        short=spread_of(short or every),
        n_short=len(short),
        long=spread_of(long or every),
        n_long=len(long),
        out_of_sample=spread_of(out_of_sample),
        n_out_of_sample=len(out_of_sample),
    )


def _fitted_kind(key: Key, line: LineFit, errors: Errors) -> FittedKind:
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
