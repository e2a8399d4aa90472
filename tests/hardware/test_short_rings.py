"""Small all-reduces: the short rings that libtpu emits, their ranges and their critical path."""

import pytest

from meshscope.events.enums import Kind
from meshscope.hardware.chips import chip_of
from meshscope.hardware.interconnect import (
    collective_lines,
    collective_time,
    constants_of,
    geometry_of,
)
from meshscope.hardware.interconnect.constants import LinkConstants, spec_constants
from meshscope.hardware.topology import parse_topology
from meshscope.plans.plan import parse_plan


def all_reduce(
    name: str,
    payload_bytes: int,
    *,
    plan: str = "",
    constants: LinkConstants | None = None,
    algorithm: str | None = None,
):
    topology = parse_topology(name)
    mesh = parse_plan(plan or f"tp={topology.n_devices}").mesh
    return collective_time(
        Kind.ALL_REDUCE,
        groups=mesh.groups("tp"),
        payload_bytes=payload_bytes,
        topology=topology,
        constants=constants,
        algorithm=algorithm,
    )


# The largest payload seen with these phases and the smallest seen with the next: bf16 all-reduces
# compiled with libtpu 0.0.42.1, `is_multistep` of RotatedPincerShortEmitter, then RotatedPincerEmitter.
COMPILED = [
    ("v5e:4x4", "", 131_072, "short rings 0,0"),
    ("v5e:4x4", "", 196_608, "short rings 1,0"),
    ("v5e:4x4", "", 524_288, "short rings 1,0"),
    ("v5e:4x4", "", 786_432, "short rings 1,1"),
    ("v5e:4x4", "", 2_097_152, "short rings 1,1"),
    ("v5e:4x4", "dp=2,tp=8", 65_536, "short rings 0"),
    ("v5e:4x4", "dp=2,tp=8", 98_304, "short rings 1"),
    ("v5e:4x4", "dp=2,tp=8", 786_432, "short rings 1"),
    ("v5e:8x8", "", 114_688, "short rings 0,0"),
    ("v5e:8x8", "", 1_048_576, "short rings 1,0"),
    ("v5e:8x8", "", 1_572_864, "short rings 1,1"),
    ("v6e:2x4", "", 65_536, "short rings 0"),
    ("v6e:2x4", "", 524_288, "short rings 1"),
    ("v6e:2x4", "", 1_048_576, "bidirectional ring"),
    ("v6e:16x16", "", 2_097_152, "short rings 1,0"),
    ("v5p:2x2x1", "", 131_072, "short rings 0,0"),
    ("v5p:2x2x1", "", 196_608, "short rings 1,0"),
    ("v5p:2x2x1", "", 393_216, "short rings 1,1"),
    ("v5p:4x4x4", "", 196_608, "short rings 0,0,0"),
    ("v5p:4x4x4", "", 262_144, "short rings 1,0,0"),
    ("v5p:4x4x4", "", 1_048_576, "short rings 1,1,0"),
]


@pytest.mark.parametrize(("name", "plan", "payload_bytes", "strategy"), COMPILED)
def test_phases_are_those_of_the_compiler(name, plan, payload_bytes, strategy) -> None:
    assert all_reduce(name, payload_bytes, plan=plan).strategy == strategy


def test_a_phase_in_one_shot_sends_the_whole_array_of_its_color() -> None:
    """4x4 without wrap: two colors of 64 KiB; the end of a line of four receives three of them.

    2 phases x 3 x 65,536 B / 4.5e10 B/s = 8.74 us, longer than 2 x 2 steps of 1 us.
    """
    constants = spec_constants(chip_of("v5e"))
    time = all_reduce("v5e:4x4", 131_072, constants=constants)
    assert time.seconds == pytest.approx(2 * 3 * 65_536 / 4.5e10)


def test_a_phase_in_steps_is_a_reduce_scatter() -> None:
    """512 KiB over 4x4, steps along one dimension: 2 x 3 shards of 64 KiB; then one shot of 64 KiB."""
    constants = spec_constants(chip_of("v5e"))
    time = all_reduce("v5e:4x4", 524_288, constants=constants)
    assert time.seconds == pytest.approx(3 * 3 * 65_536 / 4.5e10)


def test_a_tiny_all_reduce_takes_the_launch_and_one_step_to_each_neighbor() -> None:
    """2x2x1: two phases of one step; v5p profiles have 6.6 to 9.0 us for 4 B to 8 kB."""
    constants = constants_of(chip_of("v5p"))
    time = all_reduce("v5p:2x2x1", 4)
    assert time.seconds == pytest.approx(constants.rates.latency_s + 2e-6)
    assert 6e-6 < time.seconds < 9e-6


def test_latency_grows_with_the_group() -> None:
    """Launch plus n // 2 steps in one shot: 1, 2 and 4 steps over 2, 4 and 8 chips."""
    launch_s = constants_of(chip_of("v6e")).rates.latency_s
    seconds = [all_reduce(name, 8_192).seconds for name in ("v6e:1x2", "v6e:2x2", "v6e:2x4")]
    assert seconds == pytest.approx([launch_s + n * 1e-6 for n in (1, 2, 4)])


def test_the_compilers_text_selects_the_phases() -> None:
    text = "RotatedPincerShortEmitter/StrategyND, 2 colors, multistep 1,1"
    time = all_reduce("v5e:4x4", 131_072, algorithm=text)
    assert time.strategy == "short rings 1,1"


def test_sparse_cores_take_longer_steps() -> None:
    """Issue 71: 124, 130 and 162 us for 2, 4 and 8 MiB over 32 devices; below 64 KiB the core reduces."""
    assert all_reduce("tpu7x:2x2x4", 65_535).seconds < 3e-5
    assert all_reduce("tpu7x:2x2x4", 2 << 20).seconds == pytest.approx(124e-6, rel=0.1)
    assert all_reduce("tpu7x:2x2x4", 8 << 20).seconds == pytest.approx(162e-6, rel=0.25)


@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:2x4", "v5p:4x4x4", "tpu7x:2x2x1", "v4:2x2x1"])
def test_every_payload_has_a_strategy(name: str) -> None:
    topology = parse_topology(name)
    geometry = geometry_of(topology, (tuple(range(topology.n_devices)),))
    lines = collective_lines(Kind.ALL_REDUCE, geometry, constants_of(topology.chip))
    edges = {edge for line in lines for edge in line.payloads if edge < float("inf")}
    for payload in {0, 1} | {int(edge) + d for edge in edges for d in (-1, 0, 1) if edge + d >= 0}:
        assert min(line.seconds(payload) for line in lines) < 1e-2
