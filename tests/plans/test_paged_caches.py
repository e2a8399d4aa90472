"""Caches in the pages of serving engines, against page sizes and block counts of public logs."""

from typing import NamedTuple

import pytest

import meshscope
from meshscope.model.config import read_model
from meshscope.plans.caches import CacheLayout, device_cache_bytes, paged_bytes
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload

TPU, SGLANG = CacheLayout.VLLM_TPU, CacheLayout.SGLANG_JAX


class Page(NamedTuple):
    model: str
    plan: str
    cache_dtype: str
    page: int
    layout: CacheLayout
    n_bytes: int  # of a page of one layer on one device


@pytest.mark.parametrize(
    "case",
    [
        # tpu-inference issue 757: pages of 128 tokens of all 8 devices, 262,144 B in bf16's place per fp8
        # head, 524,288 B as packed: one K and one V head of 8 bits take the room of four.
        Page("meta-llama/Llama-3.1-70B", "tp=8", "f8e4m3fn", 128, TPU, 524_288 // 8),
        Page("meta-llama/Llama-3.1-70B", "tp=8", "bf16", 128, TPU, 524_288 // 8),
        Page("meta-llama/Llama-3.1-70B", "tp=4", "f8e4m3fn", 128, TPU, 524_288 // 8),
        # tpu-inference issue 145: 811,008 tokens in 24.75 GiB are 32,768 B a token, of 32 layers.
        Page("meta-llama/Llama-3.1-8B", "tp=4", "bf16", 1, TPU, 32_768 // 32),
        # Heads of 64: key and value in one row, 12,288 B a token of 24 layers.
        Page("Qwen/Qwen2.5-0.5B", "tp=1", "bf16", 1, TPU, 12_288 // 24),
        # SGLang-JAX pads heads to 128 lanes: twice that.
        Page("Qwen/Qwen2.5-0.5B", "tp=1", "bf16", 1, SGLANG, 24_576 // 24),
        # Latents of 512 and 64 elements, each padded: 640.
        Page("deepseek-ai/DeepSeek-V2-Lite", "tp=8", "bf16", 1, TPU, 2 * 640),
    ],
    ids=lambda case: f"{case.model.split('/')[-1]}-{case.plan}-{case.cache_dtype}-{case.layout}",
)
def test_a_page_has_the_bytes_of_the_engine(case: Page) -> None:
    model = read_model(case.model)
    workload = Workload(prompt=case.page, output=1, cache_dtype=case.cache_dtype)
    of_page, more = (
        paged_bytes(model, parse_plan(case.plan), model.layers[0], w, case.layout)
        for w in (workload, Workload(prompt=2 * case.page, output=1, cache_dtype=case.cache_dtype))
    )
    assert of_page is not None
    assert more is not None
    assert more - of_page == case.n_bytes


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


@pytest.mark.parametrize(
    ("model", "n_whole"),
    [
        ("google/gemma-4-31B-it", 60),  # tpu-inference has its own model: no layer frees pages
        ("google/gemma-3-27b-it", 10),  # a sixth of 62 layers, rounded down, attends to everything
    ],
)
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
