"""The constants of every chip: published peaks, corrected by what was measured and published.

For each chip one floor and one share of the peak are fitted on its half of the points
(`published.fit_half`), with an own share for all-to-all. A chip without points, or without small ones,
has the median of the others. The other half of the points judges: its errors are the intervals.
"""

from dataclasses import replace
from functools import cache
from statistics import median

import numpy as np

from meshscope.events.enums import Kind
from meshscope.interconnect.constants import (
    KindRates,
    LinkConstants,
    MeasuredRange,
    RateConstants,
    Spreads,
    spec_constants,
)
from meshscope.interconnect.fitting import fit_line, spread_of
from meshscope.interconnect.geometry import geometry_of
from meshscope.interconnect.gpu import (
    EFFICIENCY,
    PROTOCOLS,
    SHARP_CHIPS,
    SHARP_EFFICIENCY,
    SHARP_GROUP,
)
from meshscope.interconnect.lines import collective_lines, fastest
from meshscope.interconnect.published import POINTS, Point, fit_half
from meshscope.spec.hardware.chips import Chip, ChipKind, chip_of
from meshscope.spec.hardware.topology import parse_topology

SMALL_BYTES = 1 << 16  # below, a time tells of the floor
Points = tuple[Point, ...]


@cache
def fit_constants(chip: Chip) -> LinkConstants:
    """The constants of a chip, with intervals; SpecError where nobody has published its wires.

    Everybody else takes them from `stored.constants_of`, which keeps what this gives.
    """
    if chip.kind is ChipKind.GPU:
        return _gpu_constants(chip)
    spec_constants(chip)  # refuses first
    fitted, _ = fit_half(POINTS)
    return replace(
        _fit(chip, fitted),
        measured=_ranges(tuple(point for point in POINTS if point.chip == chip.name)),
        spreads=_spreads(),
    )


@cache
def _spreads() -> Spreads:
    """Of all chips together: each has too few points of its own."""
    errors = held_out_errors()
    by_length = {
        is_short: [error for point, error in errors.items() if is_short_point(point) is is_short]
        for is_short in (True, False)
    }
    unseen = left_out_errors()
    return Spreads(
        short=spread_of(by_length[True]),
        n_short=len(by_length[True]),
        long=spread_of(by_length[False]),
        n_long=len(by_length[False]),
        unseen=spread_of(unseen),
        n_unseen=len(unseen),
    )


def is_short_point(point: Point) -> bool:
    """Whether the floor or the hops take longer than the bytes, by the fit."""
    fitted, _ = fit_half(POINTS)
    geometry = geometry_of(parse_topology(point.topology), point.groups)
    lines = collective_lines(point.kind, geometry, _fit(chip_of(point.chip), fitted))
    return fastest(lines, point.payload_bytes).is_short(point.payload_bytes)


@cache
def held_out_errors() -> dict[Point, float]:
    """ln(modelled / measured) of each point that judges, by constants fitted on the others."""
    fitted, judging = fit_half(POINTS)
    return {point: log_error(point, _fit(chip_of(point.chip), fitted)) for point in judging}


@cache
def left_out_errors() -> tuple[float, ...]:
    """The same for every point, by constants fitted without any point of its chip: what a new chip may meet."""
    chips = dict.fromkeys(point.chip for point in POINTS)
    return tuple(
        log_error(point, _fit(chip_of(chip), tuple(own for own in POINTS if own.chip != chip)))
        for chip in chips
        for point in POINTS
        if point.chip == chip
    )


def modelled_s(point: Point, constants: LinkConstants) -> float:
    """Seconds that the model gives for a point."""
    geometry = geometry_of(parse_topology(point.topology), point.groups)
    lines = collective_lines(point.kind, geometry, constants)
    return fastest(lines, point.payload_bytes).seconds(point.payload_bytes)


def log_error(point: Point, constants: LinkConstants) -> float:
    """ln(modelled / measured)."""
    return float(np.log(modelled_s(point, constants) / point.seconds))


@cache
def _fit(chip: Chip, points: Points) -> LinkConstants:
    """The constants of a chip as these points tell; pooled where they do not tell of this chip."""
    spec = spec_constants(chip)
    own = tuple(point for point in points if point.chip == chip.name)
    pooled_floor_s, pooled_share, pooled_exchange = _pooled(points)
    rates = _rates(spec, own, pooled_floor_s)
    rates = rates or RateConstants(floor_s=pooled_floor_s, efficiency=pooled_share)
    exchange = _exchange_share(spec, own, rates.floor_s) or pooled_exchange
    fitted = replace(
        spec,
        rates=rates,
        by_kind=(
            KindRates(
                kind=Kind.ALL_TO_ALL,
                rates=RateConstants(floor_s=rates.floor_s, efficiency=exchange),
            ),
        ),
    )
    limited = _with_limits(fitted, own)
    return replace(
        limited,
        links_at_once=limited.links_at_once or _pooled_links(chip, points),
        host_bytes_per_s=_network(limited, points),
    )


def _network(constants: LinkConstants, points: Points) -> float | None:
    """What a host sends to others: this chip's, else that of the one chip that tells of it.

    Hosts of all chips have the same published figure.
    """
    telling = next((p for p in points if parse_topology(p.topology).n_slices > 1), None)
    if telling is None or telling.chip == constants.chip:
        return constants.host_bytes_per_s
    return _fit(chip_of(telling.chip), points).host_bytes_per_s


def _pooled_links(chip: Chip, points: Points) -> float | None:
    """The part of all its links that the one chip drives which tells of that, of this chip's links."""
    telling = next((point for point in points if _uses_four_links(point)), None)
    if telling is None or telling.chip == chip.name:
        return None
    other = chip_of(telling.chip)
    links = _fit(other, points).links_at_once
    return None if links is None else links / other.n_grid_dims * chip.n_grid_dims


@cache
def _pooled(points: Points) -> tuple[float, float, float]:
    """Median floor, share of the peak and share in all-to-all of the chips that tell of them."""
    chips = list(dict.fromkeys(point.chip for point in points))
    by_chip = {chip: tuple(p for p in points if p.chip == chip) for chip in chips}
    specs = {chip: spec_constants(chip_of(chip)) for chip in chips}
    whole = [_rates(specs[chip], own, None) for chip, own in by_chip.items()]
    floor_s = median(rates.floor_s for rates in whole if rates is not None)
    shares = [_rates(specs[chip], own, floor_s) for chip, own in by_chip.items()]
    share = median(rates.efficiency for rates in shares if rates is not None)
    exchanges = [_exchange_share(specs[chip], own, floor_s) for chip, own in by_chip.items()]
    return floor_s, share, median([e for e in exchanges if e is not None] or [share])


def _rates(spec: LinkConstants, own: Points, floor_s: float | None) -> RateConstants | None:
    """Floor and share of the peak; with `floor_s` that floor where the points hold none that are small.

    The floor is the median of what small collectives take beyond their bytes; the share follows from
    the others. Fitted together, the many large ones would take the floor for noise.
    """
    points = [
        point for point in own if not _tells_of_a_limit(point) and point.kind is not Kind.ALL_TO_ALL
    ]
    small = [point for point in points if point.payload_bytes < SMALL_BYTES]
    large = [point for point in points if point.payload_bytes >= SMALL_BYTES]
    if small:
        floor_s = median(point.seconds - _wire_s(point, spec) for point in small)
    if not large or floor_s is None:
        return None
    fit = fit_line(
        [_wire_s(point, spec) for point in large],
        [point.seconds for point in large],
        name=f"collectives of {spec.chip}",
        floor_s=floor_s,
    )
    return RateConstants(
        floor_s=floor_s, efficiency=min(1.0, 1 / fit.slowness)
    )  # no wire beats its peak


@cache
def _wire_s(point: Point, spec: LinkConstants) -> float:
    """Seconds of the bytes alone, at the published peak."""
    geometry = geometry_of(parse_topology(point.topology), point.groups)
    lines = collective_lines(point.kind, geometry, spec)
    return point.payload_bytes * min(line.s_per_byte for line in lines)


def _exchange_share(spec: LinkConstants, own: Points, floor_s: float) -> float | None:
    points = [point for point in own if point.kind is Kind.ALL_TO_ALL]
    if not points:
        return None
    fit = fit_line(
        [_wire_s(point, spec) for point in points],
        [point.seconds for point in points],
        name=f"all-to-all of {spec.chip}",
        floor_s=floor_s,
    )
    return 1 / fit.slowness


def _tells_of_a_limit(point: Point) -> bool:
    """Whether it is the one point of its chip that uses four links at once, or another network."""
    return parse_topology(point.topology).n_slices > 1 or _uses_four_links(point)


def _uses_four_links(point: Point) -> bool:
    return point.topology == "v6e:16x16"


def _with_limits(constants: LinkConstants, own: Points) -> LinkConstants:
    """The rates of the network and of all links at once, from the one point that tells of each."""
    rates = constants.rates
    for point in own:
        wire_s = point.seconds - rates.floor_s
        geometry = geometry_of(parse_topology(point.topology), point.groups)
        if parse_topology(point.topology).n_slices > 1:
            (demand,) = geometry.demands(point.kind)
            load_bytes = point.payload_bytes * sum(leg.host for leg in demand.legs)
            constants = replace(constants, host_bytes_per_s=load_bytes / wire_s / rates.efficiency)
        elif _uses_four_links(point):
            assert constants.link_bytes_per_s is not None
            injected = min(
                sum(leg.injected for leg in demand.legs) for demand in geometry.demands(point.kind)
            )
            per_link = constants.link_bytes_per_s * rates.efficiency
            constants = replace(
                constants, links_at_once=point.payload_bytes * injected / wire_s / per_link
            )
    return constants


def _ranges(points: Points) -> tuple[MeasuredRange, ...]:
    found: list[MeasuredRange] = []
    for kind in dict.fromkeys(point.kind for point in points):
        of_kind = [point for point in points if point.kind is kind]
        payloads = [point.payload_bytes for point in of_kind]
        sizes = [len(point.groups[0]) for point in of_kind]
        found.append(
            MeasuredRange(
                kind=kind,
                min_payload_bytes=min(payloads),
                max_payload_bytes=max(payloads),
                min_group_size=min(sizes),
                max_group_size=max(sizes),
            )
        )
    return tuple(found)


def _gpu_constants(chip: Chip) -> LinkConstants:
    spec = spec_constants(chip)
    rates = RateConstants(floor_s=0.0, efficiency=EFFICIENCY[chip.name])
    sharp = RateConstants(floor_s=0.0, efficiency=SHARP_EFFICIENCY)
    return replace(
        spec,
        rates=rates,
        by_kind=(
            KindRates(kind=Kind.ALL_REDUCE, rates=rates),
            KindRates(kind=Kind.ALL_REDUCE, rates=sharp, group_size=SHARP_GROUP),
        )
        if chip.name in SHARP_CHIPS
        else (),
        protocols=PROTOCOLS,
        source=f"{spec.source}; NCCL's tuning model",
    )
