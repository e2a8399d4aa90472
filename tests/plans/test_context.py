"""Context parallelism: local tokens, cache slots and ring pairs."""

import pytest

from meshscope.model.config import read_model
from meshscope.plans.caches import cache_slots, device_cache_bytes, ring_pairs
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload


@pytest.mark.parametrize(
    ("plan", "prompt", "output", "n_slots"),
    [
        ("tp=8", 128, 17, 145),
        ("cp=8", 128, 16, 16 + 2),
        ("cp=8", 128, 17, 16 + 3),  # one device has a third token, and all have room for it
        ("cp=2,tp=4", 128, 1, 64 + 1),
    ],
)
def test_cache_slots_are_the_block_plus_a_rounded_share(
    plan: str, prompt: int, output: int, n_slots: int
) -> None:
    workload = Workload(prompt=prompt, output=output)
    assert cache_slots(parse_plan(plan), workload) == n_slots
    bytes_a_slot = 36 * 2 * 8 * 128 * 2 // parse_plan(plan).tp  # L36 K8 H128
    cache_bytes = device_cache_bytes(read_model("Qwen3-4B"), parse_plan(plan), workload)
    assert cache_bytes == n_slots * bytes_a_slot


def test_a_ring_passes_through_each_group() -> None:
    groups = Mesh(axes=(("cp", 3), ("tp", 2))).groups("cp")
    assert ring_pairs(groups) == ((0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1))
