"""Small all-reduces: the short rings that libtpu emits, their ranges and their critical path."""

from pathlib import Path
from typing import Any

import pytest
from tables import read_rows

from meshscope.events.enums import Kind
from meshscope.hardware.chips import chip_of
from meshscope.hardware.interconnect.constants import constants_of, spec_constants
from meshscope.hardware.interconnect.lines import collective_lines, collective_time
from meshscope.hardware.interconnect.strategies import geometry_of
from meshscope.hardware.topology import parse_topology
from meshscope.plans.plan import parse_plan


def all_reduce(name: str, payload_bytes: int, *, plan: str | None = None, **options: Any):
    topology = parse_topology(name)
    groups = parse_plan(plan or f"tp={topology.n_devices}").mesh.groups("tp")
    return collective_time(
        Kind.ALL_REDUCE, groups=groups, payload_bytes=payload_bytes, topology=topology, **options
    )


@pytest.mark.parametrize(
    ("name", "plan", "payload_bytes", "strategy"),
    read_rows(Path(__file__).parent / "short_rings.csv", str, str, int, str),
)
def test_phases_are_those_of_the_compiler(name, plan, payload_bytes, strategy) -> None:
    assert all_reduce(name, payload_bytes, plan=plan).strategy == strategy


@pytest.mark.parametrize(("payload_bytes", "n_shards"), [(131_072, 2 * 3), (524_288, 3 * 3)])
def test_a_phase_sends_the_array_of_its_color_or_shards_of_it(payload_bytes, n_shards) -> None:
    """4x4 without wrap: of 128 KiB, two colors of 64 KiB, of which the end of a line receives three.

    2 phases x 3 x 65,536 B / 4.5e10 B/s = 8.74 us, longer than 2 x 2 steps of 1 us. 512 KiB takes steps
    along one dimension, 2 x 3 shards of 64 KiB as in a reduce-scatter; then one shot of 64 KiB.
    """
    time = all_reduce("v5e:4x4", payload_bytes, constants=spec_constants(chip_of("v5e")))
    assert time.seconds == pytest.approx(n_shards * 65_536 / 4.5e10)


@pytest.mark.parametrize(
    ("name", "payload_bytes", "n_steps"),
    [("v5p:2x2x1", 4, 2), ("v6e:1x2", 8192, 1), ("v6e:2x2", 8192, 2), ("v6e:2x4", 8192, 4)],
)
def test_a_small_all_reduce_takes_the_launch_and_its_steps(name, payload_bytes, n_steps) -> None:
    """n // 2 steps of 1 us in one shot, or two phases of one; v5p profiles have 6.6 to 9.0 us."""
    seconds = all_reduce(name, payload_bytes).seconds
    launch_s = constants_of(parse_topology(name).chip).rates.latency_s
    assert seconds == pytest.approx(launch_s + n_steps * 1e-6)
    assert name != "v5p:2x2x1" or 6e-6 < seconds < 9e-6


def test_the_compilers_text_selects_the_phases() -> None:
    text = "RotatedPincerShortEmitter/StrategyND, 2 colors, multistep 1,1"
    time = all_reduce("v5e:4x4", 131_072, algorithm=text)
    assert time.strategy == "short rings 1,1"


def test_sparse_cores_take_longer_steps() -> None:
    """Issue 71: 124, 130 and 162 us for 2, 4 and 8 MiB over 32 devices; below 64 KiB the core reduces.

    Over 2x2 chips each leg is one step to a neighbor: a decode step of Qwen3.5-397B leaves some 16 us for each of
    its 121 all-reduces of 64 KiB.
    """
    assert all_reduce("tpu7x:2x2x4", 65_535).seconds < 3e-5
    assert all_reduce("tpu7x:2x2x4", 4 << 20).seconds == pytest.approx(130e-6, rel=0.15)
    assert all_reduce("tpu7x:2x2x4", 2 << 20).seconds == pytest.approx(124e-6, rel=0.2)
    small, offloaded = (all_reduce("tpu7x:2x2x1", n << 10).seconds for n in (32, 64))
    assert small < offloaded < 20e-6
    assert all_reduce("tpu7x:2x2x4", 8 << 20).seconds == pytest.approx(162e-6, rel=0.25)


@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:2x4", "v5p:4x4x4", "tpu7x:2x2x1", "v4:2x2x1"])
def test_every_payload_has_a_strategy(name: str) -> None:
    topology = parse_topology(name)
    geometry = geometry_of(topology, (tuple(range(topology.n_devices)),))
    lines = collective_lines(Kind.ALL_REDUCE, geometry, constants_of(topology.chip))
    edges = {edge for line in lines for edge in line.payloads if edge < float("inf")}
    for payload in {0, 1} | {int(edge) + d for edge in edges for d in (-1, 0, 1) if edge + d >= 0}:
        assert min(line.seconds(payload) for line in lines) < 1e-2
