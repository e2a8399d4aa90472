"""The decode attention kernel, interpreted on a CPU, equals plain attention to a written cache."""

import re
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="the programs need JAX")

import jax.numpy as jnp  # noqa: E402

from meshscope.programs.jax.attention import (  # noqa: E402
    AttentionScores,
    PartialAttention,
    dot_product_attention,
)
from meshscope.programs.jax.decode_attention import (  # noqa: E402
    DecodeBlocks,
    decode_attention,
    decode_blocks,
)
from meshscope.programs.jax.numerics import MASKED, causal_mask  # noqa: E402

# Outputs are means of values of order 1, of order 16 in s8. In float32 only the order of sums differs;
# with bfloat16 queries the shares of the softmax are rounded to 8 bits.
TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2}


class Case(NamedTuple):
    name: str
    position: int
    heads: int = 2
    group: int = 4
    width: int = 64
    slots: int = 384
    batch: int = 2
    window: int | None = None
    is_chunked: bool = False
    has_sinks: bool = False
    value_width: int | None = None  # of values that are channels of the keys
    has_mask: bool = False
    cache: str = "float32"
    dtype: str = "float32"


CASES = [
    Case("first-position", 0),
    Case("second-position", 1),
    Case("end-of-block", 127),
    Case("start-of-block", 128),
    Case("inside-third-block", 300),
    Case("last-slot", 383),
    Case("slots-not-a-multiple-of-blocks", 298, slots=300),
    Case("two-blocks-of-512", 700, slots=1000),
    Case("one-head-of-many-sequences", 200, heads=1, batch=6),
    Case("eight-heads-of-one-query", 200, heads=8, group=1, width=128),
    Case("three-queries-a-head", 200, group=3),
    Case("window-inside-block", 350, window=20),
    Case("window-over-two-blocks", 260, window=128),
    Case("window-before-it-is-full", 50, window=128),
    Case("window-longer-than-a-block", 383, window=200),
    Case("chunk", 300, window=128, is_chunked=True),
    Case("start-of-chunk", 256, window=128, is_chunked=True),
    Case("sinks", 200, has_sinks=True),
    Case("sinks-at-first-position", 0, has_sinks=True),
    Case("window-and-sinks", 200, window=128, has_sinks=True, heads=1, group=8),
    Case("latent", 200, heads=1, group=16, width=96, value_width=64),
    Case("latent-s8", 200, heads=1, group=16, width=96, value_width=64, cache="int8"),
    Case("mask", 300, has_mask=True, heads=1, batch=4),
    Case("mask-without-the-new-position", 301, has_mask=True, heads=1, batch=4, slots=350),
    Case("mask-of-several-heads", 300, has_mask=True, width=96, value_width=64),
    Case("s8", 300, cache="int8"),
    Case("fp8", 300, cache="float8_e4m3fn"),
    Case("bf16", 300, cache="bfloat16", dtype="bfloat16"),
    Case("bf16-and-s8", 300, cache="int8", dtype="bfloat16", width=128),
]


class Arrays(NamedTuple):
    """Queries [B, S, N, H] and a stack of caches, whose later slots hold large values."""

    q: Any
    caches: list[Any]
    sinks: Any


def random_arrays(case: Case, n_tokens: int = 1, n_layers: int = 2) -> Arrays:
    key, n_arrays = jax.random.key(0), 1 if case.value_width else 2

    def random(index: int, *shape: int) -> Any:
        return jax.random.normal(jax.random.fold_in(key, index), shape)

    shape = (n_layers, case.batch, case.heads, case.slots, case.width)
    caches = [scale(case) * random(i, *shape) for i in range(n_arrays)]
    caches = [cache.at[..., case.position + 1 :, :].set(100.0) for cache in caches]
    q = random(5, case.batch, n_tokens, case.heads * case.group, case.width)
    sinks = random(9, case.heads * case.group) if case.has_sinks else None
    return Arrays(q.astype(case.dtype), [cache.astype(case.cache) for cache in caches], sinks)


def scale(case: Case) -> float:
    return 16.0 if case.cache == "int8" else 1.0


def scores_of(case: Case, sinks: Any) -> AttentionScores:
    return AttentionScores(scale=case.width**-0.5 / scale(case), sinks=sinks)


def mask_of(case: Case, n_tokens: int = 1) -> Any:
    """The slots that each token attends to [B or 1, S, T]."""
    positions = case.position - jnp.arange(n_tokens)[::-1]
    slots = jnp.arange(case.slots)
    mask = causal_mask(positions, slots, case.window, is_chunked=case.is_chunked)[None]
    if not case.has_mask:
        return mask
    return mask & ((slots * 7 + jnp.arange(case.batch)[:, None]) % 3 == 1)[:, None]


@partial(jax.jit, static_argnames=("case",))
def interpreted(case: Case, arrays: Arrays, mask: Any) -> Any:
    """The output [B, S, N, V] of the kernel for layer 1."""
    n_tokens, n_heads = arrays.q.shape[1], case.heads
    grouped = arrays.q.reshape(case.batch, n_tokens, n_heads, -1, case.width).swapaxes(1, 2)
    bias = jnp.where(mask, 0.0, MASKED)
    out, logs = decode_attention(
        grouped.reshape(case.batch, n_heads, -1, case.width),
        bias if n_tokens == 1 else jnp.repeat(bias, case.group, axis=1),
        arrays.caches,
        1,
        scores_of(case, None),
        value_width=case.value_width or case.width,
        mean_context=1,
        window=case.window,
        is_interpreted=True,
    )
    outs = (
        x.reshape(case.batch, n_heads, n_tokens, case.group, -1).swapaxes(1, 2) for x in (out, logs)
    )
    out, logs = (x.reshape(case.batch, n_tokens, n_heads * case.group, -1) for x in outs)
    part = PartialAttention.of_normalized(out, logs[..., 0])
    return part.with_sinks(arrays.sinks).normalized(jnp.float32)


def plain(case: Case, arrays: Arrays, mask: Any) -> np.ndarray:
    keys, values = (arrays.caches[i][1].swapaxes(1, 2).astype(case.dtype) for i in (0, -1))
    seen = (mask & (jnp.arange(case.slots) <= case.position))[..., None, None]
    values = jnp.where(seen.any((0, 1)), values, 0)[..., : case.value_width or case.width]
    whole = jnp.broadcast_to(mask, (case.batch, *mask.shape[1:]))
    scores = scores_of(case, arrays.sinks)
    return np.asarray(dot_product_attention(arrays.q, keys, values, whole, scores), np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_decode_attention_equals_plain_attention(case: Case) -> None:
    check(case, random_arrays(case), mask_of(case))


TOKEN_CASES = [
    Case("over-two-blocks", 129, group=3),
    Case("windows-from-different-blocks", 257, window=129),
    Case("window-and-sinks", 200, window=128, has_sinks=True, heads=1, group=8),
    Case("two-chunks", 257, window=128, is_chunked=True),
    Case("latent-s8", 200, heads=1, group=16, width=96, value_width=64, cache="int8"),
    Case("mask", 300, has_mask=True, batch=4),
]


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda c: c.name)
def test_each_of_several_tokens_attends_to_its_own_positions(case: Case) -> None:
    check(case, random_arrays(case, n_tokens=4), mask_of(case, n_tokens=4))


def check(case: Case, arrays: Arrays, mask: Any) -> None:
    got, expected = np.asarray(interpreted(case, arrays, mask)), plain(case, arrays, mask)
    tolerance = TOLERANCES[case.dtype] * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(got, expected, atol=tolerance, rtol=0)


def test_a_device_without_any_of_the_positions_adds_nothing() -> None:
    """Under cp, a window may be on other devices."""
    case = Case("none", 200)
    arrays = random_arrays(case)
    nothing = jnp.full((1, 1, case.slots), MASKED)
    grouped = arrays.q.reshape(case.batch, case.heads, case.group, case.width)

    out, logs = decode_attention(
        grouped,
        nothing,
        arrays.caches,
        0,
        scores_of(case, None),
        value_width=case.width,
        mean_context=1,
        is_interpreted=True,
    )

    part = PartialAttention.of_normalized(out, logs[..., 0])
    assert not np.asarray(part.numerator).any()
    assert (np.asarray(part.largest) == np.float32(MASKED)).all()


@pytest.mark.parametrize(
    ("n_sequences", "n_slots", "slot_bytes", "expected"),
    [
        (8, 2304, 2 * 128, (8, 512)),  # one head in s8: 1 MiB
        (8, 8320, 8 * 2 * 256, (1, 256)),  # eight heads in bf16
        (3, 1000, 4 * 2 * 256, (1, 512)),
        (6, 2304, 2 * 128, (6, 512)),
        (10, 2304, 2 * 128, (5, 512)),  # divides the sequences
        (8, 2304, 64 * 2 * 256, (1, 128)),  # at least 128 keys
        (8, 128, 2 * 128, (8, 128)),  # a window or a short cache
    ],
)
def test_blocks_hold_about_a_mebibyte(
    n_sequences: int, n_slots: int, slot_bytes: int, expected: tuple[int, int]
) -> None:
    blocks = decode_blocks(n_sequences, n_slots, slot_bytes)
    assert (blocks.n_together, blocks.n_keys) == expected


@pytest.mark.parametrize(
    ("n_present", "window", "n_fetched"),
    [
        (1, None, 128),
        (128, None, 128),
        (129, None, 256),
        (300, None, 300),
        (300, 128, 172),
        (290, 20, 44),
    ],
)
def test_a_sequence_fetches_whole_blocks_of_its_window(
    n_present: int, window: int | None, n_fetched: int
) -> None:
    """300 slots, the last block being shorter: block 2 has slots 256 to 299."""
    blocks = DecodeBlocks(n_together=1, n_keys=128)
    assert blocks.n_fetched(n_present, 300, window) == n_fetched


def stated(case: Case, mean_context: float) -> tuple[int, int, str]:
    """FLOPs and bytes that the kernel states, and its program."""
    arrays = random_arrays(case)
    grouped = arrays.q.reshape(case.batch, case.heads, case.group, case.width)
    call = partial(
        decode_attention,
        layer=0,
        scores=scores_of(case, None),
        value_width=case.value_width or case.width,
        mean_context=mean_context,
    )
    text = str(jax.make_jaxpr(call)(grouped, jnp.zeros((1, 1, case.slots)), arrays.caches))
    cost = re.search(r"CostEstimate\(flops=(\d+), .*?bytes_accessed=(\d+)", text)
    assert cost is not None
    return int(cost[1]), int(cost[2]), text


def test_the_kernel_states_the_cost_of_the_mean_context() -> None:
    """Three blocks of 512 keys."""
    case = Case("cost", 0, heads=2, group=4, width=128, slots=2048, batch=8, cache="int8")
    flops, n_bytes, text = stated(case, 1100.5)

    assert flops == 2 * (8 * 2 * 4 * 1536) * 256
    assert n_bytes == 8 * 2 * 1536 * 256 + 4 * 8 * 2 * 4 * 256
    assert "name=decode_attention_b4_k512_block" in text


def test_the_stated_bytes_include_the_padding_of_rows() -> None:
    """576 channels of a latent take 640, in 1024 slots that are fetched."""
    case = Case(
        "cost", 0, heads=1, group=4, width=576, value_width=512, slots=1024, cache="bfloat16"
    )
    n_bytes = stated(case, 900)[1]

    assert n_bytes == case.batch * 1024 * 640 * 2 + 4 * case.batch * 4 * (576 + 512)
