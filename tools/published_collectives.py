"""Published timings of collectives on real chips: the data for fitting and checking the constants.

Times are seconds of one execution on the device. If a source publishes only a rate, the time follows
from the definition of that rate, stated beside it. `split_points` takes every second point of a chip, in
order of kind and payload, for the fit; the others are the holdout.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind
from meshscope.hardware.interconnect.fabric import fabric_of
from meshscope.hardware.interconnect.strategies import hamiltonian_order
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.caches import ring_pairs
from meshscope.plans.plan import parse_plan

XPROF_V5P = "openxla/xprof@5fe358978e59, golden hlo_stats of a MaxText step on 4 v5p chips"
XPROF_V6E = "openxla/xprof@01d85deb6a7a, test_xplanes/tpu_inference_2.xplane.pb"
CCL_BENCH = "cornell-sysphotonics/ccl-bench@1d257f07, Llama-3.1-8B on v6e"
IRONWOOD = "AI-Hypercomputer/accelerator-microbenchmarks@63b035b4, Ironwood/guides/collectives/all_gather.md"
TPU_CAKE = "tpu-cake, contracts/tpu7x-collective-latency-v1.json"
SPARSECORE = (
    "AI-Hypercomputer/accelerator-microbenchmarks issue 71, psum of f32 over 32 devices of 2x2x4 chips, "
    "median of 5 runs in the profile"
)
TRILLIUM = "AI-Hypercomputer/tpu-recipes, microbenchmarks/trillium/collectives/README.md"
MARIN = "marin-community/marin issue 6736 (2026-06-28), ppermute over one ring in bf16"
RECIPES = "AI-Hypercomputer/tpu-recipes@c8cfe2f, microbenchmarks/ironwood, all_gather of f32 in groups of four"
SCALING_BOOK = (
    "jax-ml/scaling-book@0819a7d, sharding.md, pop quiz 2: an actual profile, read off its text"
)


RING = "ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published timing.

    Its groups are an `axis` of `plan` on `topology`, or the rows of chips in grid dimension `along` if
    the source mapped the mesh to the grid itself; along `RING`, pairs of neighbors.
    """

    topology: str
    plan: str = ""
    axis: str = ""
    along: str = ""
    kind: Kind
    payload_bytes: int
    seconds: float
    source: str
    note: str = ""

    @property
    def chip(self) -> str:
        """The name of its chip."""
        return parse_topology(self.topology).chip.name

    @property
    def groups(self) -> Groups:
        """The groups of device ids."""
        if self.along == RING:
            return ring_around(parse_topology(self.topology))
        if self.along:
            return groups_along(parse_topology(self.topology), self.along)
        return parse_plan(self.plan).mesh.groups(*self.axis.split("+"))


def groups_along(topology: Topology, dim: str, core: int = 0) -> Groups:
    """The device ids of each row of chips along x, y or z, one core of each chip."""
    fabric = fabric_of(topology)
    at = fabric.coordinates
    others = [other for other in range(3) if other != "xyz".index(dim)]
    rows: dict[tuple[int, ...], list[int]] = {}
    for device in range(topology.n_devices):
        if fabric.core[device] == core:
            key = (int(fabric.slice_index[device]), *(int(at[device, o]) for o in others))
            rows.setdefault(key, []).append(device)
    return tuple(map(tuple, rows.values()))


def ring_around(topology: Topology) -> Groups:
    """The (source, target) pairs of one ring over neighbors through all chips."""
    order = hamiltonian_order(fabric_of(topology).sizes[::-1])
    places = fabric_of(topology).coordinates @ np.cumprod([1, *fabric_of(topology).sizes[:2]])
    return ring_pairs((tuple(np.argsort(places)[order].tolist()),))


def _v5p(kind: Kind, payload_bytes: int, microseconds: float, note: str = "") -> Point:
    return Point(
        topology="v5p:2x2x1",
        plan="tp=4",
        axis="tp",
        kind=kind,
        payload_bytes=payload_bytes,
        seconds=microseconds * 1e-6,
        source=XPROF_V5P,
        note=note,
    )


def _ccl_bench(topology: str, tp: int, gib_per_s: float) -> Point:
    """An all-reduce of bf16[8192,4096], the message of an 8192-token step.

    The published rate counts GiB read and written, times 2(n-1)/n; this inverts it.
    """
    payload_bytes = 8192 * 4096 * 2
    accessed_gib = 2 * payload_bytes / 2**30
    return Point(
        topology=topology,
        plan=f"tp={tp}",
        axis="tp",
        kind=Kind.ALL_REDUCE,
        payload_bytes=payload_bytes,
        seconds=accessed_gib * 2 * (tp - 1) / tp / gib_per_s,
        source=CCL_BENCH,
        note="message size inferred from the model and a step of 8192 tokens",
    )


def _ironwood(topology: str, plan: str, rows: int, gb_per_s: float) -> Point:
    """A gather of f32[rows,8,128] over four devices; the rate counts three shards for both cores."""
    shard_bytes = rows * 8 * 128 * 4
    return Point(
        topology=topology,
        plan=plan,
        axis="dp",
        kind=Kind.ALL_GATHER,
        payload_bytes=4 * shard_bytes,
        seconds=6 * shard_bytes / (gb_per_s * 1e9),
        source=IRONWOOD,
        note="four chips of a plane, both cores at once: our reading of its 'transferred data'",
    )


def _tpu_cake(payload_bytes: int, microseconds: float) -> Point:
    return Point(
        topology="tpu7x:2x2x1",
        plan="dp=4,tp=2",
        axis="tp",
        kind=Kind.ALL_GATHER,
        payload_bytes=2 * payload_bytes,
        seconds=microseconds * 1e-6,
        source=TPU_CAKE,
        note="groups of two of eight devices, taken to be the two cores of a chip",
    )


def _sparsecore(mib: int, microseconds: float) -> Point:
    return Point(
        topology="tpu7x:2x2x4",
        plan="tp=32",
        axis="tp",
        kind=Kind.ALL_REDUCE,
        payload_bytes=mib << 20,
        seconds=microseconds * 1e-6,
        source=SPARSECORE,
        note="run by the SparseCores, as libtpu 0.0.42.1 compiles it",
    )


def _marin(topology: str, payload_bytes: int, microseconds: float) -> Point:
    return Point(
        topology=topology,
        along=RING,
        kind=Kind.PERMUTE,
        payload_bytes=payload_bytes,
        seconds=microseconds * 1e-6,
        source=MARIN,
        note="one ring over neighbors, slope of a loop; 4.5 and 5.6 us are given for 1 to 16 KiB",
    )


def _recipe(payload_bytes: int, microseconds: float) -> Point:
    return Point(
        topology="tpu7x:2x2x2",
        plan="dp=2,cp=4,tp=2",
        axis="cp",
        kind=Kind.ALL_GATHER,
        payload_bytes=payload_bytes,
        seconds=microseconds * 1e-6,
        source=RECIPES,
        note="groups of four chips",
    )


POINTS: tuple[Point, ...] = (
    _ccl_bench("v6e:1x2", 2, 151.166),
    _ccl_bench("v6e:2x2", 4, 311.035),
    _ccl_bench("v6e:2x4", 8, 326.912),
    Point(
        topology="v6e:2x4",
        plan="dp=2,tp=4",
        axis="dp",
        kind=Kind.ALL_REDUCE,
        payload_bytes=5_368_709_120,
        seconds=0.1217,
        source=XPROF_V6E,
        note="groups {0,4},{1,5},{2,6},{3,7}",
    ),
    Point(
        topology="v6e:16x16",
        plan="tp=256",
        axis="tp",
        kind=Kind.ALL_REDUCE,
        payload_bytes=17408 * 17408 * 2,
        # benchmark_collectives.py: matrix x 2(n-1)/n / time.
        seconds=17408 * 17408 * 2 * 2 * 255 / 256 / 235.7595345022845e9,
        source=TRILLIUM,
    ),
    Point(
        topology="2xv6e:16x16",
        plan="dp=2,tp=256",
        axis="dp",
        kind=Kind.ALL_REDUCE,
        payload_bytes=17408 * 17408 * 2 // 2,
        # benchmark_collectives.py: matrix x 2(m-1)/m / m / time, for m slices.
        seconds=17408 * 17408 * 2 * 2 * (1 / 2) / 2 / 4.1130934137328214e9,
        source=TRILLIUM,
        note="two slices: the number is not stated",
    ),
    _v5p(Kind.ALL_GATHER, 131_072_000, 983.377),
    _v5p(Kind.ALL_GATHER, 8_388_608, 69.500),
    _v5p(Kind.ALL_GATHER, 8_388_608, 68.940, "backward pass"),
    _v5p(Kind.ALL_GATHER, 32_768, 7.795),
    _v5p(Kind.REDUCE_SCATTER, 29_360_128, 219.024, "fused, some compute in it"),
    _v5p(Kind.REDUCE_SCATTER, 29_360_128, 226.421, "fused, some compute in it"),
    _v5p(Kind.REDUCE_SCATTER, 29_360_128, 221.089, "fused, some compute in it"),
    _v5p(Kind.REDUCE_SCATTER, 262_144_000, 1969.453, "fused, some compute in it"),
    _v5p(Kind.REDUCE_SCATTER, 8_388_608, 67.243, "fused, some compute in it"),
    _v5p(Kind.REDUCE_SCATTER, 8_388_608, 64.785, "fused, some compute in it"),
    _v5p(Kind.REDUCE_SCATTER, 8_388_608, 64.657, "fused, some compute in it"),
    _v5p(Kind.REDUCE_SCATTER, 8_388_608, 64.457, "fused, some compute in it"),
    _v5p(Kind.ALL_TO_ALL, 8_388_608, 63.205),
    _v5p(Kind.ALL_TO_ALL, 8_388_608, 63.595, "backward pass"),
    _v5p(Kind.ALL_REDUCE, 8_192, 8.390, "two arrays"),
    _v5p(Kind.ALL_REDUCE, 4_096, 6.612),
    _v5p(Kind.ALL_REDUCE, 76, 8.972, "19 scalars"),
    _v5p(Kind.ALL_REDUCE, 36, 6.720, "9 scalars"),
    _v5p(Kind.ALL_REDUCE, 4, 6.951),
    _ironwood("tpu7x:2x2x1", "dp=4,tp=2", 64, 71.7703034),
    _ironwood("tpu7x:2x2x1", "dp=4,tp=2", 256, 129.1869148),
    _ironwood("tpu7x:2x2x1", "dp=4,tp=2", 1024, 161.9040742),
    _ironwood("tpu7x:2x2x1", "dp=4,tp=2", 4096, 174.765465),
    _ironwood("tpu7x:2x2x1", "dp=4,tp=2", 16384, 178.7714158),
    Point(
        topology="v5e:8x4",
        along="y",
        kind=Kind.ALL_GATHER,
        payload_bytes=2048 * 8192 * 2,
        seconds=680e-6,
        source=SCALING_BOOK,
    ),
    Point(
        topology="v5e:8x4",
        along="y",
        kind=Kind.ALL_GATHER,
        payload_bytes=256 * 256 * 2,
        seconds=8e-6,
        source=SCALING_BOOK,
        note="'closer to 8us'",
    ),
    _tpu_cake(256, 8.045),
    _tpu_cake(2048, 8.385),
    _tpu_cake(4096, 8.639),
    _sparsecore(2, 123.763505),
    _sparsecore(4, 129.909964),
    _sparsecore(8, 162.322929),
    _marin("v5p:2x2x1", 1024, 4.5),
    _marin("v5p:2x2x1", 1 << 20, 16.94),
    _marin("v6e:2x4", 1024, 5.6),
    _marin("v6e:2x4", 1 << 20, 17.45),
    _recipe(1 << 20, 22.62),
    _recipe(16 << 20, 155.26),
    _recipe(256 << 20, 2252.0),
)


@cache
def split_points(points: tuple[Point, ...]) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Fitted points and holdout points: every second one of each chip, in order of kind and payload.

    The first point of a chip is a holdout, so at most half are fitted. The only point on four links at
    once and the only one on DCN are always fitted; no published holdout checks them.
    """
    fitted = [point for point in points if _is_only_evidence(point)]
    holdout: list[Point] = []
    others = [point for point in points if not _is_only_evidence(point)]
    for chip in dict.fromkeys(point.chip for point in others):
        chip_points = [point for point in others if point.chip == chip]
        chip_points.sort(key=lambda point: (point.kind, point.payload_bytes, point.seconds))
        n_fitted = sum(point.chip == chip for point in points) // 2
        n_fitted -= sum(point.chip == chip for point in points if _is_only_evidence(point))
        selected = chip_points[1::2][:n_fitted]
        fitted += selected
        holdout += [point for point in chip_points if point not in selected]
    return tuple(fitted), tuple(holdout)


def _is_only_evidence(point: Point) -> bool:
    return point.source == TRILLIUM
