"""Caches of our programs and of serving engines, and blocks of positions under cp."""

from tables import table

import meshscope
from meshscope.model.config import read_model
from meshscope.plans.caches import (
    CacheLayout,
    cache_slots,
    device_cache_bytes,
    paged_bytes,
    ring_pairs,
)
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload


@table
def test_cache_slots_are_the_block_plus_a_rounded_share(plan, prompt, output, n_slots) -> None:
    workload = Workload(prompt=prompt, output=output)
    assert cache_slots(parse_plan(plan), workload) == n_slots
    bytes_a_slot = 36 * 2 * 8 * 128 * 2 // parse_plan(plan).tp  # L36 K8 H128
    cache_bytes = device_cache_bytes(read_model("Qwen3-4B"), parse_plan(plan), workload)
    assert cache_bytes == n_slots * bytes_a_slot


def test_a_ring_passes_through_each_group() -> None:
    groups = Mesh(axes=(("cp", 3), ("tp", 2))).groups("cp")
    assert ring_pairs(groups) == ((0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1))


TPU = CacheLayout.VLLM_TPU


@table
def test_a_page_has_the_bytes_of_the_engine(
    *, model, plan, cache_dtype, page, layout: CacheLayout, n_bytes
) -> None:
    """The bytes are of a page of one layer on one device."""
    read = read_model(model)
    of_page, more = (
        paged_bytes(read, parse_plan(plan), read.layers[0], workload, layout)
        for n in (1, 2)
        for workload in [Workload(prompt=n * page, output=1, cache_dtype=cache_dtype)]
    )
    assert more - of_page == n_bytes


def test_the_blocks_of_a_public_log_fit_and_twice_as_many_do_not() -> None:
    """tpu-inference issue 757: 4,338 blocks of 128 tokens; 8,676 before heads were packed."""
    run = meshscope.predict(
        "meta-llama/Llama-3.1-70B",
        topology="v6e-8",
        plan="tp=8",
        engine="vllm",
        weight_dtype="int8",
        cache_dtype="fp8",
    )
    memory = run.memory
    free_bytes = memory.hbm_bytes - memory.weights_bytes
    per_token = memory.kv_cache_bytes / 256
    assert per_token == 40_960
    assert 4_338 * 128 < free_bytes / per_token < 1.15 * 4_338 * 128


@table
def test_layers_with_a_window_free_pages_if_the_engine_does(model: str, n_whole: int) -> None:
    read, plan = read_model(model), parse_plan("tp=4")
    sizes = [Workload(prompt=n - 1, output=1) for n in (8192, 16384)]
    grown = [
        paged_bytes(read, plan, layer, sizes[0], TPU) != paged_bytes(read, plan, layer, sizes[1], TPU)
        for layer in read.layers
    ]  # fmt: skip
    assert sum(grown) == n_whole
    total = device_cache_bytes(read, plan, sizes[0], layout=TPU)
    assert total == sum(paged_bytes(read, plan, layer, sizes[0], TPU) for layer in read.layers)
