"""Latency and bandwidth of a chip's interconnect: published peaks, constants fitted to measurements, NCCL's model.

Source: NVIDIA/nccl@01afd20a, src/graph/tuning.cc (`baseLat`, `hwLat`, `ncclTopoTuneModel`). Left out:
trees, CollNet, and NVLink SHARP except for its published rate. All-reduces over many nodes therefore
come out slower than with NCCL's trees.

A chip without published figures has no constants; asking for them raises SpecError.
"""

from dataclasses import dataclass
from functools import cache
from math import log

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.hardware.chips import Chip, ChipKind
from meshscope.hardware.compiler_facts import OPERATIONS, fitted_constants
from meshscope.serialize import from_plain


@dataclass(frozen=True, slots=True)
class Protocol:
    """Launch latency, latency of a step over NVLink and over the network, and fraction of bandwidth."""

    name: str
    base_s: float
    link_step_s: float
    network_step_s: float
    share: float
    all_reduce_share: float


# One step between neighbors, or its bytes if they take longer: scaling book, part 3 ("typically around
# 1us"); part 2, question 5 uses the same value. An older edition of the page (@04d8de58)
# has half of it.
_HOP_S = 1e-6
# Scaling book, part 2: a host sends about 2.5e10 B/s over the data center network.
_DCN_BYTES_PER_S = 2.5e10


@dataclass(frozen=True, slots=True, kw_only=True)
class RateConstants:
    """Fitted latency (alpha) of a collective in seconds, and the fraction of peak bandwidth it reaches."""

    latency_s: float  # of the launch; calibrated ones include the hops
    efficiency: float
    hop_s: float | None = None  # of a hop in a leg of several; None for the chip's


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRates:
    """Constants of one kind of collective, for one group size or (None) for all sizes."""

    kind: Kind
    rates: RateConstants
    group_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRange:
    """Payloads in bytes and group sizes between which a kind of collective was measured."""

    kind: Kind
    min_payload_bytes: int
    max_payload_bytes: int
    min_group_size: int
    max_group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreads:
    """Factors that cover 90 % of prediction errors, each with its number of errors."""

    short: float  # latency exceeds transfer time
    n_short: int
    long: float  # transfer time dominates
    n_long: int
    out_of_sample: float  # outside the measured ranges
    n_out_of_sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConstants:
    """Interconnect of one chip. Rates are peaks in one direction; None if the chip has no such path."""

    chip: str
    link_bytes_per_s: float | None
    links_at_once: float | None  # links that one chip can drive together; None: all
    die_bytes_per_s: float | None  # between the two cores of a chip
    host_bytes_per_s: float | None  # DCN rate of one TPU host, or of one GPU
    memory_bytes_per_s: float | None  # of virtual devices that share one memory
    hop_s: float
    rates: RateConstants
    offloads_from: int | None = None  # bytes that go to SparseCores; None: the default
    by_kind: tuple[KindRates, ...] = ()
    protocols: tuple[Protocol, ...] = ()  # NCCL's
    crossing_s: float = 0.0  # added to a send between nodes for each device of a stage
    measured: tuple[MeasuredRange, ...] = ()
    spreads: Spreads | None = None  # of prediction intervals; None without holdout measurements
    source: str = ""

    def rates_of(self, kind: Kind, group_size: int) -> RateConstants:
        """Constants of this kind for this group size, else for any size, else for the nearest size."""

        def distance(entry: KindRates) -> tuple[int, float]:
            if entry.group_size in {group_size, None}:
                return (entry.group_size is None, 0.0)
            return (2, abs(log((entry.group_size or 1) / group_size)))

        of_kind = [entry for entry in self.by_kind if entry.kind is kind]
        return min(of_kind, key=distance).rates if of_kind else self.rates

    def is_measured(self, kind: Kind, payload_bytes: float, group_size: int) -> bool:
        """Whether the collective is inside a measured range of this chip."""
        return any(
            one.kind is kind
            and one.min_payload_bytes <= payload_bytes <= one.max_payload_bytes
            and one.min_group_size <= group_size <= one.max_group_size
            for one in self.measured
        )


@cache
def constants_of(chip: Chip) -> LinkConstants:
    """The fitted constants of a chip, with intervals; SpecError for a chip without links or without a fit."""
    spec_constants(chip)  # raises SpecError
    stored = fitted_constants(chip.name).get("collectives")
    if stored is None:
        raise SpecError(
            f"no constants of {chip.name} are fitted. Run 'make constants' in the clone of meshscope."
        )
    return from_plain(LinkConstants, stored)


def spec_constants(chip: Chip) -> LinkConstants:
    """The published peaks at full efficiency, with hop latency only: the scaling book's model."""
    is_tpu = chip.kind is ChipKind.TPU
    host_bytes_per_s = _DCN_BYTES_PER_S if is_tpu else OPERATIONS.network_bytes_per_s.get(chip.name)
    has_links = chip.kind is not ChipKind.CPU and chip.link_bytes_per_s is not None
    if not has_links or host_bytes_per_s is None:
        what = "network rate" if has_links else "interconnect figures"
        raise SpecError(
            f"'{chip.name}' has no published {what}. "
            "Measure it with 'meshscope calibrate' and pass the file with --profile."
        )
    return LinkConstants(
        chip=chip.name,
        link_bytes_per_s=chip.link_bytes_per_s,
        links_at_once=None,
        die_bytes_per_s=chip.die_bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
        memory_bytes_per_s=None,
        hop_s=_HOP_S if is_tpu else 0.0,
        rates=RateConstants(latency_s=0.0, efficiency=1.0),
        source=chip.source,
    )
