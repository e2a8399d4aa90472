"""Blocks of ragged paged attention: how many a prompt takes, and the cycles of each."""

from math import ceil
from types import SimpleNamespace

import numpy as np
import pytest

from meshscope.cost.paged import PagedBlocks, n_blocks

V6E_FLOPS_PER_CYCLE = 918e12 / 1.75e9
NO_WINDOW = float(1 << 40)


def _form(queries: int, keys: int, *, skips_masked: bool) -> SimpleNamespace:
    """What a closed form knows of the blocks."""
    return SimpleNamespace(block_queries=queries, block_keys=keys, skips_masked=skips_masked)


def _counted(form: SimpleNamespace, prompt: int, chunk: int, window: int | None) -> int:
    """Every pair of blocks that the loops of the kernel run over."""
    n = 0
    for start in range(0, prompt, chunk):
        for first in range(start, start + chunk, form.block_queries):
            end = first + form.block_queries if form.skips_masked else start + chunk
            seen_from = first if form.skips_masked else start
            begin = 0 if window is None else max(seen_from - window, 0) // form.block_keys
            n += ceil(end / form.block_keys) - begin
    return n


@pytest.mark.parametrize(
    ("queries", "keys", "skips_masked"), [(128, 2048, False), (128, 256, False), (32, 1024, True)]
)
@pytest.mark.parametrize(
    ("prompt", "chunk"), [(1024, 1024), (8192, 2048), (8192, 8192), (6144, 2048)]
)
@pytest.mark.parametrize("window", [None, 4096])
def test_blocks_of_a_prompt_are_those_of_the_loops(
    queries: int,
    keys: int,
    prompt: int,
    chunk: int,
    window: int | None,
    *,
    skips_masked: bool,
) -> None:
    """Near the first positions a window counts one block more or less."""
    form = _form(queries, keys, skips_masked=skips_masked)
    n = n_blocks(form, float(prompt), float(chunk), min(window or NO_WINDOW, prompt))
    tolerance = 1e-9 if window is None else 0.15
    assert n == pytest.approx(_counted(form, prompt, chunk, window), rel=tolerance)


@pytest.mark.parametrize(
    ("version", "n_rows", "n_keys", "n_kv_heads", "bundles"),
    [
        ("vllm-v3", 512, 1152, 1, 1875),
        ("vllm-v3", 512, 1024, 4, 1608),
        ("vllm-v3", 8, 1024, 8, 220),
        ("vllm-v3", 128, 1024, 8, 562),
        ("vllm-v3", 256, 1024, 8, 899),
        ("vllm-v3", 8, 1024, 32, 204),
        ("vllm-v3", 64, 1024, 32, 344),
        ("sglang-v3", 256, 1024, 2, 1233),
        ("sglang-v3", 1024, 1024, 2, 3937),
        ("sglang-v2", 512, 2048, 2, 3427),
        ("sglang-v2", 1024, 1024, 2, 3320),
        ("sglang-v2", 256, 1024, 1, 1110),
        ("sglang-v2", 256, 256, 8, 352),
        ("sglang-v2", 256, 256, 16, 389),
        ("sglang-v2", 256, 256, 32, 481),
    ],
)
def test_bundles_of_a_head_in_kernels_compiled_alone(
    version: str, n_rows: int, n_keys: int, n_kv_heads: int, bundles: int
) -> None:
    """tpu-inference 0.12 with libtpu 0.0.24, then 0.24 and SGLang-JAX with 0.0.42.1; all on v6e with heads of 128."""
    blocks = PagedBlocks(queries=n_rows // 2, keys=n_keys, version=version)
    cycles = blocks.cycles(
        n_heads=2,
        n_kv_heads=n_kv_heads,
        score_flops=4 * 128,
        flops_per_cycle=V6E_FLOPS_PER_CYCLE,
    )
    assert (cycles - 700) / n_kv_heads == pytest.approx(bundles, rel=0.08)


def test_counts_of_many_prompts_at_once_are_those_of_each() -> None:
    form = _form(32, 1024, skips_masked=True)
    prompts = np.array([1024.0, 6144.0])
    both = n_blocks(form, prompts, prompts, prompts)
    assert list(both) == [n_blocks(form, p, p, p) for p in prompts]
