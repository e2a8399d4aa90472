"""Fits the interconnect constants of every chip to published timings and stores them in the package.

    make constants        (python tools/fit_collectives.py)

Run it after a change of the points, of a chip's figures or of the fit, and read the difference in
`src/meshscope/hardware/fitted_constants.json`.

Each chip gets one launch latency and one efficiency, fitted to its half of the points
(`published_collectives.split_points`), with a separate efficiency for all-to-all. The hops of an algorithm
take 1 us each (all-reduces that SparseCores run over lines of chips: a fitted time), or as long as their bytes.
Permutes have a launch of their own: no ring synchronizes. Where SparseCores transfer, gathers over links start later
than those between the cores of a chip, by a line through their points. A chip without points
takes the medians of the others. The errors of the other half, the holdout, give the intervals.
"""

from dataclasses import asdict, replace
from functools import cache
from statistics import median

import numpy as np
from constants_file import update_constants
from published_collectives import POINTS, Point, split_points

from meshscope.analysis.samples import fit_line, spread_of
from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.hardware.chips import CHIPS, Chip, ChipKind, chip_of
from meshscope.hardware.interconnect.constants import (
    KindRates,
    LinkConstants,
    MeasuredRange,
    Protocol,
    RateConstants,
    Spreads,
    spec_constants,
)
from meshscope.hardware.interconnect.lines import (
    CollectiveLine,
    collective_lines,
    fastest,
    offloaded_from,
)
from meshscope.hardware.interconnect.strategies import geometry_of
from meshscope.hardware.topology import parse_topology

SMALL_BYTES = 1 << 16  # payloads below this determine the latency

# NVIDIA/nccl@01afd20a, src/graph/tuning.cc (`baseLat`, `hwLat`, `ncclTopoTuneModel`).
PROTOCOLS = (
    Protocol("LL", 3.6e-06, 4.7e-07, 2.7e-06, 1 / 3, 1 / 4),
    Protocol("LL128", 1e-05, 1.9e-06, 4e-06, 0.92, 0.92),
    Protocol("Simple", 8.4e-06, 3.4e-06, 9.6e-06, 1.0, 1.0),
)
# Fraction of NVLink's line rate. Hopper: "450GB/s is the line rate. With the protocol overhead (~20%) NCCL can get an
# effective NVLink bandwidth of 370GB/s" (an author of NCCL, NVIDIA/nccl-tests issue 212). Ampere: tuning.cc caps the
# ring at 235 GB/s of 300.
EFFICIENCY = {"h100": 370 / 450, "h200": 370 / 450, "a100": 235 / 300}
# An all-reduce of eight GPUs with NVLink SHARP, whose bus bandwidth exceeds the line rate: "you should reach a peak
# busBw of ~480GB/s" of 450 (NVIDIA/nccl-tests issue 212).
SHARP_EFFICIENCY, SHARP_CHIPS, SHARP_GROUP = 480 / 450, frozenset({"h100", "h200"}), 8
Points = tuple[Point, ...]


def main() -> None:
    """Writes the `collectives` entry of every chip with published links."""
    entries: dict[str, object] = {}
    for name, chip in CHIPS.items():
        try:
            entries[name] = asdict(fit_constants(chip))
        except SpecError:
            continue  # no published links
    update_constants("collectives", entries)


@cache
def fit_constants(chip: Chip) -> LinkConstants:
    """The constants of a chip, with intervals; SpecError for a chip without published links."""
    if chip.kind is ChipKind.GPU:
        return _gpu_constants(chip)
    spec_constants(chip)  # raises SpecError
    fitted, _ = split_points(POINTS)
    return replace(
        _fit(chip, fitted),
        measured=_ranges(tuple(point for point in POINTS if point.chip == chip.name)),
        spreads=_spreads(),
    )


@cache
def _spreads() -> Spreads:
    """Spreads over all chips together, because each has too few points of its own."""
    errors = holdout_errors()
    short, long = (
        [error for point, error in errors.items() if is_latency_bound(point) is is_short]
        for is_short in (True, False)
    )
    out_of_sample = left_out_errors()
    return Spreads(
        short=spread_of(short),
        n_short=len(short),
        long=spread_of(long),
        n_long=len(long),
        out_of_sample=spread_of(out_of_sample),
        n_out_of_sample=len(out_of_sample),
    )


def is_latency_bound(point: Point) -> bool:
    """Whether latency or hops exceed the transfer time, by the fit."""
    fitted, _ = split_points(POINTS)
    return _line(point, _fit(chip_of(point.chip), fitted)).is_latency_bound(point.payload_bytes)


@cache
def holdout_errors() -> dict[Point, float]:
    """ln(modeled / measured) of each holdout point, with constants fitted to the other half."""
    fitted, holdout = split_points(POINTS)
    return {point: log_error(point, _fit(chip_of(point.chip), fitted)) for point in holdout}


@cache
def left_out_errors() -> tuple[float, ...]:
    """ln(modeled / measured) of each point, with constants fitted to the points of other chips.

    Without those of SparseCores, which only one chip has for all-reduces.
    """
    chips = dict.fromkeys(point.chip for point in POINTS)
    return tuple(
        log_error(point, _fit(chip_of(chip), tuple(p for p in POINTS if p.chip != chip)))
        for chip in chips
        for point in POINTS
        if point.chip == chip and not _is_offloaded(point)
    )


def modeled_s(point: Point, constants: LinkConstants) -> float:
    """Seconds that the model gives for a point."""
    return _line(point, constants).seconds(point.payload_bytes)


def log_error(point: Point, constants: LinkConstants) -> float:
    """ln(modeled / measured)."""
    return float(np.log(modeled_s(point, constants) / point.seconds))


def _line(point: Point, constants: LinkConstants) -> CollectiveLine:
    geometry = geometry_of(parse_topology(point.topology), point.groups)
    return fastest(collective_lines(point.kind, geometry, constants), point.payload_bytes)


@cache
def _fit(chip: Chip, points: Points) -> LinkConstants:
    """The constants of a chip from these points, pooled over chips if it has none of its own."""
    spec = spec_constants(chip)
    own_points = tuple(point for point in points if point.chip == chip.name)
    pooled_latency_s, pooled_efficiency, pooled_exchange = _pooled(points)
    rates = _rates(spec, own_points, pooled_latency_s)
    rates = rates or RateConstants(latency_s=pooled_latency_s, efficiency=pooled_efficiency)
    exchange = _exchange_efficiency(spec, own_points, rates.latency_s) or pooled_exchange
    all_to_all = KindRates(
        kind=Kind.ALL_TO_ALL,
        rates=RateConstants(latency_s=rates.latency_s, efficiency=exchange),
    )
    offloaded = _offloaded(replace(spec, rates=rates), own_points)
    by_kind = (all_to_all, _permutes(rates, own_points, _pooled_permute(points)), *offloaded)
    limited = _with_limits(replace(spec, rates=rates, by_kind=by_kind), own_points)
    return replace(
        limited,
        links_at_once=limited.links_at_once or _pooled_links(chip, points),
        host_bytes_per_s=_host_bytes_per_s(limited, points),
    )


def _permutes(rates: RateConstants, points: Points, pooled: float) -> KindRates:
    """Permutes of a chip: their own launch, or without points the part of other launches that others take."""
    launches = _launches(tuple(point for point in points if point.kind is Kind.PERMUTE))
    latency_s = median(launches) if launches else rates.latency_s * pooled
    return KindRates(kind=Kind.PERMUTE, rates=replace(rates, latency_s=latency_s))


@cache
def _pooled_permute(points: Points) -> float:
    """Launches of permutes over those of other collectives, the median of the chips with both."""
    ratios: list[float] = []
    for chip in dict.fromkeys(point.chip for point in points):
        permutes = tuple(p for p in points if p.chip == chip and p.kind is Kind.PERMUTE)
        if of_permutes := _launches(permutes):
            plain = tuple(p for p in points if p.chip == chip and p.kind is not Kind.PERMUTE)
            ratios.append(
                median(of_permutes) / median(_launches(plain) or _launches(_plain(points)))
            )
    return median(ratios or [1.0])


def _offloaded(constants: LinkConstants, points: Points) -> tuple[KindRates, ...]:
    """Gathers and all-reduces by SparseCores over links, and hops of all-reduces over lines of several chips.

    Times hardly grow from 2 to 4 MiB over 32 devices, so steps bound them and not bytes. Groups of two devices are
    the cores of a chip, whose launch is that of small gathers.
    """
    steps = tuple(point for point in points if _is_offloaded(point))
    if not steps:
        return ()
    gathers = [p for p in points if p.kind is Kind.ALL_GATHER and len(p.groups[0]) > 2]
    fit = fit_line(
        [_transfer_s(point, spec_constants(chip_of(constants.chip))) for point in gathers],
        [point.seconds for point in gathers],
        name=f"gathers over links of {constants.chip}",
    )
    on_cores = constants.rates
    efficiency = min(1.0, 1 / fit.inverse_bandwidth)
    rates = replace(on_cores, latency_s=fit.latency_s, efficiency=efficiency)
    step_s = median(_step_s(point, constants, fit.latency_s) for point in steps)
    by_kind = {
        Kind.ALL_GATHER: None,
        Kind.REDUCE_SCATTER: None,
        Kind.ALL_REDUCE: step_s,
    }
    return tuple(
        KindRates(kind=kind, rates=replace(of_size, hop_s=hop_s), group_size=size)
        for kind, hop_s in by_kind.items()
        for size, of_size in ((2, on_cores), (None, rates))
    )


def _step_s(point: Point, constants: LinkConstants, latency_s: float) -> float:
    """Seconds of a step in legs of several, beyond the launch and the single hops."""
    rates = (RateConstants(latency_s=0.0, efficiency=1.0, hop_s=hop_s) for hop_s in (0.0, 1.0))
    single_s, with_steps = (
        _line(point, replace(constants, by_kind=(KindRates(kind=point.kind, rates=r),))).hops_s
        for r in rates
    )
    return (point.seconds - latency_s - single_s) / (with_steps - single_s)


def _host_bytes_per_s(constants: LinkConstants, points: Points) -> float | None:
    """DCN rate of a host, measured on one chip; the hosts of all chips have the same published rate."""
    measured = next((p for p in points if _is_dcn(p)), None)
    if measured is None or measured.chip == constants.chip:
        return constants.host_bytes_per_s
    return _fit(chip_of(measured.chip), points).host_bytes_per_s


def _pooled_links(chip: Chip, points: Points) -> float | None:
    """Links that a chip drives at once, scaled from the one chip with a measurement."""
    measured = next((point for point in points if _uses_four_links(point)), None)
    if measured is None or measured.chip == chip.name:
        return None
    other = chip_of(measured.chip)
    links = _fit(other, points).links_at_once
    return None if links is None else links / other.n_grid_dims * chip.n_grid_dims


@cache
def _pooled(points: Points) -> tuple[float, float, float]:
    """Median latency of small collectives, and efficiencies over the chips with points."""
    chips = list(dict.fromkeys(point.chip for point in points))
    by_chip = {chip: tuple(p for p in points if p.chip == chip) for chip in chips}
    specs = {chip: spec_constants(chip_of(chip)) for chip in chips}
    latency_s = median(_launches(_plain(points)))
    pooled = [_rates(specs[c], chip_points, latency_s) for c, chip_points in by_chip.items()]
    efficiency = median(rates.efficiency for rates in pooled if rates is not None)
    exchanges = [
        _exchange_efficiency(specs[c], chip_points, latency_s) for c, chip_points in by_chip.items()
    ]
    return latency_s, efficiency, median([e for e in exchanges if e is not None] or [efficiency])


def _rates(spec: LinkConstants, points: Points, latency_s: float | None) -> RateConstants | None:
    """Latency and efficiency; without small points the given latency, and None without a latency.

    The latency is the median of what small collectives take beyond their hops and bytes. A joint fit
    would treat it as noise of the many large points.
    """
    points = _plain(points)
    plain = [p for p in points if not _is_limit(p) and p.kind is not Kind.ALL_TO_ALL]
    large = [point for point in plain if point.payload_bytes >= SMALL_BYTES]
    if launches := _launches(points):
        latency_s = median(launches)
    if not large or latency_s is None:
        return None
    fit = fit_line(
        [_transfer_s(point, spec) for point in large],
        [point.seconds for point in large],
        name=f"collectives of {spec.chip}",
        latency_s=latency_s,
    )
    # No link exceeds its peak.
    return RateConstants(latency_s=latency_s, efficiency=min(1.0, 1 / fit.inverse_bandwidth))


def _plain(points: Points) -> Points:
    return tuple(point for point in points if point.kind is not Kind.PERMUTE)


def _launches(points: Points) -> list[float]:
    """Seconds of each small collective beyond its hops and bytes."""
    return [
        point.seconds - _unlaunched_s(point, spec_constants(chip_of(point.chip)))
        for point in points
        if point.payload_bytes < SMALL_BYTES
    ]


@cache
def _transfer_s(point: Point, spec: LinkConstants) -> float:
    """Seconds of the bytes alone, at the published peak."""
    return point.payload_bytes * _line(point, spec).s_per_byte


@cache
def _unlaunched_s(point: Point, spec: LinkConstants) -> float:
    """Seconds of hops or bytes, at the published peak."""
    return _line(point, spec).seconds(point.payload_bytes)


def _exchange_efficiency(spec: LinkConstants, points: Points, latency_s: float) -> float | None:
    exchanges = [point for point in points if point.kind is Kind.ALL_TO_ALL]
    if not exchanges:
        return None
    fit = fit_line(
        [_transfer_s(point, spec) for point in exchanges],
        [point.seconds for point in exchanges],
        name=f"all-to-all of {spec.chip}",
        latency_s=latency_s,
    )
    return 1 / fit.inverse_bandwidth


def _is_limit(point: Point) -> bool:
    """Whether the point determines a constant of its own: DCN, four links at once, or SparseCores."""
    return _is_dcn(point) or _uses_four_links(point) or _is_offloaded(point)


def _is_offloaded(point: Point) -> bool:
    constants = spec_constants(chip_of(point.chip))
    return point.payload_bytes >= offloaded_from(point.kind, constants)


def _is_dcn(point: Point) -> bool:
    return parse_topology(point.topology).n_slices > 1


def _uses_four_links(point: Point) -> bool:
    return point.topology == "v6e:16x16"


def _with_limits(constants: LinkConstants, points: Points) -> LinkConstants:
    """The DCN rate and the links driven at once, each from the only point that shows it."""
    rates = constants.rates
    for point in points:
        transfer_s = point.seconds - rates.latency_s
        demands = geometry_of(parse_topology(point.topology), point.groups).demands(point.kind)
        if _is_dcn(point):
            (demand,) = demands
            load_bytes = point.payload_bytes * sum(leg.host for leg in demand.legs)
            host_bytes_per_s = load_bytes / transfer_s / rates.efficiency
            constants = replace(constants, host_bytes_per_s=host_bytes_per_s)
        elif _uses_four_links(point):
            assert constants.link_bytes_per_s is not None
            injected = min(sum(leg.injected for leg in demand.legs) for demand in demands)
            per_link = constants.link_bytes_per_s * rates.efficiency
            links = point.payload_bytes * injected / transfer_s / per_link
            constants = replace(constants, links_at_once=links)
    return constants


def _ranges(points: Points) -> tuple[MeasuredRange, ...]:
    return tuple(
        _range(kind, [point for point in points if point.kind is kind])
        for kind in dict.fromkeys(point.kind for point in points)
    )


def _range(kind: Kind, points: list[Point]) -> MeasuredRange:
    payloads = [point.payload_bytes for point in points]
    sizes = [len(point.groups[0]) for point in points]
    return MeasuredRange(
        kind=kind,
        min_payload_bytes=min(payloads),
        max_payload_bytes=max(payloads),
        min_group_size=min(sizes),
        max_group_size=max(sizes),
    )


def _gpu_constants(chip: Chip) -> LinkConstants:
    """NCCL's tuning model, without a fit."""
    spec = spec_constants(chip)
    rates = RateConstants(latency_s=0.0, efficiency=EFFICIENCY[chip.name])
    sharp = RateConstants(latency_s=0.0, efficiency=SHARP_EFFICIENCY)
    all_reduce = (
        KindRates(kind=Kind.ALL_REDUCE, rates=rates),
        KindRates(kind=Kind.ALL_REDUCE, rates=sharp, group_size=SHARP_GROUP),
    )
    return replace(
        spec,
        rates=rates,
        by_kind=all_reduce if chip.name in SHARP_CHIPS else (),
        protocols=PROTOCOLS,
        source=f"{spec.source}; NCCL's tuning model",
    )


if __name__ == "__main__":
    main()
