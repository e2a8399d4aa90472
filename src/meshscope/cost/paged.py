"""Ragged paged attention of serving engines: its blocks, how many of them a prompt takes, and the cycles of each.

The kernel runs a block of queries over blocks of keys of its sequence, for all KV heads of the device. Queries of one
KV head are the rows of a product. The cycles are bundles that libtpu writes for the kernels of SGLang-JAX and
tpu-inference alone (`paged_attention` in `hardware/operation_rates.json`). Left out: stalls, and waits for pages.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from meshscope.hardware.compiler_facts import ALL_CHIPS, OPERATIONS, PagedAttention
from meshscope.model.mechanisms.attention import causal_blocks

VLLM = "vllm-v3"  # the version that is assumed of a server
ROW_TILE = 8  # rows of a register
HEAD_PACKING = 2  # query heads of a KV head are padded to pairs of bf16
# Width of the matrix unit that a head must fill: chips above it have units of 256, the others of 128.
WIDE_UNIT_FLOPS_PER_CYCLE = 4e5


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBlocks:
    """Queries and keys of a block in a version of the kernel."""

    queries: int
    keys: int
    version: str = VLLM

    @property
    def facts(self) -> PagedAttention:
        """The cycles of the version."""
        return OPERATIONS.paged_attention[self.version]

    def cycles(
        self, *, n_heads: int, n_kv_heads: int, score_flops: float, flops_per_cycle: float
    ) -> float:
        """Cycles of one block of queries with one block of keys, for all KV heads with `n_heads` query heads each.

        A score has `score_flops`, its value included. The vector unit or the matrix unit bounds the scores.
        """
        facts = self.facts
        n_packed = ceil(n_heads / HEAD_PACKING) * HEAD_PACKING
        n_rows = ceil(self.queries * n_packed / ROW_TILE) * ROW_TILE
        unit = 256 if flops_per_cycle > WIDE_UNIT_FLOPS_PER_CYCLE else 128
        padded = ceil(score_flops / 4 / unit) * 4 * unit
        of_rows = n_rows * max(facts.score_cycles, padded / flops_per_cycle)
        of_key = facts.key_cycles + facts.load_cycles * n_kv_heads + of_rows
        of_heads = n_kv_heads * (facts.head_cycles + self.keys * of_key)
        return facts.body_cycles + facts.fetch_cycles + of_heads


def local_heads(n_heads: int, n_kv_heads: int, tp: int) -> tuple[int, int]:
    """Query heads of each KV head of a device, and KV heads, with tp."""
    local_kv_heads = max(1, n_kv_heads // tp)
    return ceil(n_heads / tp / local_kv_heads), local_kv_heads


def blocks_of(version: str, chip: str, n_heads: int, n_kv_heads: int) -> PagedBlocks:
    """The blocks of a version of the kernel on a chip, with `n_heads` query heads for each KV head of a device."""
    sizes = OPERATIONS.paged_blocks[version]
    n_rows = sizes.n_rows.get(chip, sizes.n_rows.get(ALL_CHIPS, 0))
    n_queries = sizes.n_queries or max(1, n_rows >> (n_heads - 1).bit_length())
    at = f"{n_heads * n_kv_heads}/{n_kv_heads}"
    queries, keys = sizes.by_heads.get(at, (n_queries, sizes.n_keys))
    return PagedBlocks(queries=queries, keys=keys, version=version)


def n_blocks(of: Any, prompt: Any, positions: Any, window: Any) -> Any:
    """Pairs of blocks that one prompt takes in chunks of `positions`, all chunks together. Arguments may be arrays.

    `of` is a closed form with its `block_queries`, `block_keys` and `skips_masked`. Without skipping, keys are counted
    as if each chunk ended a block.
    """
    n_query_blocks = np.ceil(positions / of.block_queries) * (prompt / positions)
    keys, n_chunks = prompt / of.block_keys, prompt / positions
    width = np.ceil(window / of.block_keys) + 1
    n_rows, rest = np.divmod(keys, 1.0)
    pairs = causal_blocks(n_rows, np.minimum(n_rows, width)) + rest * np.minimum(n_rows + 1, width)
    of_chunk = np.ceil(positions / of.block_keys)
    whole = np.minimum(of_chunk * (n_chunks + 1) / 2, of_chunk + width - 1)
    return n_query_blocks * np.where(of.skips_masked, pairs / keys, whole)
