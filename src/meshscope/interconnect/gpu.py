"""NCCL's tuning model for collectives among GPUs: three protocols, of which the fastest wins.

Source: NVIDIA/nccl@01afd20a, src/graph/tuning.cc (`baseLat`, `hwLat`, `ncclTopoTuneModel`). Left out:
trees, CollNet, and NVLink SHARP except for its published rate. All-reduces over many nodes therefore
come out slower than with NCCL's trees.
"""

from dataclasses import dataclass

from meshscope.errors import SpecError
from meshscope.events.enums import Kind


@dataclass(frozen=True, slots=True)
class Protocol:
    """Launch latency, latency of a step over NVLink and over the network, and fraction of bandwidth."""

    name: str
    base_s: float
    link_step_s: float
    network_step_s: float
    share: float
    all_reduce_share: float


PROTOCOLS: tuple[Protocol, ...] = (
    Protocol("LL", 3.6e-6, 0.47e-6, 2.7e-6, 1 / 3, 1 / 4),
    Protocol("LL128", 10e-6, 1.9e-6, 4e-6, 0.92, 0.92),
    Protocol("Simple", 8.4e-6, 3.4e-6, 9.6e-6, 1.0, 1.0),
)

# Fraction of NVLink's line rate that NCCL reaches. Hopper: "450GB/s is the line rate. With the protocol
# overhead (~20%) NCCL can get an effective NVLink bandwidth of 370GB/s" (an author of NCCL,
# NVIDIA/nccl-tests issue 212). Ampere: tuning.cc caps the ring at 235 GB/s of 300.
EFFICIENCY: dict[str, float] = {"h100": 370 / 450, "h200": 370 / 450, "a100": 235 / 300}

# All-reduce of eight GPUs with NVLink SHARP: "you should reach a peak busBw of ~480GB/s" (same issue).
# The switch reduces in the network, so the bus bandwidth exceeds the line rate.
SHARP_EFFICIENCY = 480 / 450
SHARP_CHIPS = frozenset({"h100", "h200"})
SHARP_GROUP = 8

# One NIC per GPU, one direction: ConnectX-7 at 400 Gb/s in a DGX H100 (its user guide, "Network
# Modules"), ConnectX-6 at 200 Gb/s in a DGX A100.
_NETWORK_BYTES_PER_S: dict[str, float] = {"h100": 5e10, "h200": 5e10, "a100": 2.5e10}


def gpu_network_bytes_per_s(chip: str) -> float:
    """Network rate of one GPU in bytes/s and one direction; SpecError without a published figure."""
    if chip not in _NETWORK_BYTES_PER_S:
        raise SpecError(
            f"'{chip}' has no published network rate. "
            "Measure it with 'meshscope calibrate' and pass the file with --profile."
        )
    return _NETWORK_BYTES_PER_S[chip]


def bandwidth_frac(protocol: Protocol, kind: Kind) -> float:
    """The fraction of the bandwidth that carries payload under a protocol."""
    return protocol.all_reduce_share if kind is Kind.ALL_REDUCE else protocol.share
