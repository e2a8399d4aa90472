"""Attention FLOPs against masks written out pair by pair."""

from itertools import product

import numpy as np
import pytest

from meshscope.model.config import read_model
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.attention import causal_blocks, window_blocks


@pytest.mark.parametrize(
    ("n_rows", "block", "window"), list(product((1, 2, 5, 9), (4, 8), (1, 3, 4, 5, 8, 9, 100)))
)
def test_blocks_are_those_of_the_mask(n_rows: int, block: int, window: int) -> None:
    at = np.arange(n_rows * block)
    distance = at[:, None] - at[None, :]
    seen = (distance >= 0) & (distance < window)
    blocks = seen.reshape(n_rows, block, n_rows, block).any(axis=(1, 3))
    width = min(n_rows, window_blocks(window, block))
    assert causal_blocks(n_rows, width) == blocks.sum()


@pytest.mark.parametrize("context", [1, 100, 128, 129, 4096])
def test_windowed_layers_of_gpt_oss_attend_to_their_window(context: int) -> None:
    attention = read_model("openai/gpt-oss-120b").attention
    assert attention.window_of(AttentionKind.SLIDING) == 128
    for kind, window in ((AttentionKind.SLIDING, 128), (AttentionKind.FULL, context)):
        n_pairs = sum(min(position + 1, window) for position in range(context))
        assert attention.attended_pairs(kind, context) == n_pairs
        widths = attention.n_heads * attention.head_widths[0]
        assert attention.flops(kind, context) == 2 * 2 * widths * n_pairs


@pytest.mark.parametrize("n", [1, 7, 8192, 8193, 20_000])
def test_chunked_layers_of_llama_4_attend_to_their_chunk(n: int) -> None:
    attention = read_model("meta-llama/Llama-4-Scout-17B-16E-Instruct").attention
    n_pairs = sum(position % 8192 + 1 for position in range(n))
    assert attention.attended_pairs(AttentionKind.CHUNKED, n) == n_pairs
    assert attention.attended_pairs(AttentionKind.FULL, n) == n * (n + 1) // 2
