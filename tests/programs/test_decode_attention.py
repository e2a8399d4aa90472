"""The decode attention kernel, interpreted on a CPU, equals plain attention to a written cache."""

import re
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases, read_cases

from meshscope.programs.jax.attention import AttentionScores, dot_product_attention
from meshscope.programs.jax.decode_attention import DecodeInputs, decode_attention
from meshscope.programs.jax.numerics import causal_mask

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


CASES = read_cases(Path(__file__).parent / "decode_attention_cases.csv", Case)
# One of each kind of mask, cache and dtype; without a new position, nothing is written that the others could differ in.
WRITTEN = {"first-position", "end-of-block", "window-over-two-blocks", "chunk", "sinks"}
WRITTEN |= {"latent-s8", "mask", "bf16-and-s8"}


def random_inputs(case: Case, n_layers: int = 2) -> DecodeInputs:
    """A query, a new position and a stack of caches, whose later slots hold large values."""
    random = np.random.default_rng(0)
    n_arrays = 1 if case.value_width else 2
    scale = 16.0 if case.cache == "int8" else 1.0

    def normal(dtype: str, *shape: int, times: float = 1.0) -> Any:
        return jnp.asarray((times * random.normal(size=shape)).astype(dtype))

    rows = (case.batch, case.heads)
    caches = [
        scale * random.normal(size=(n_layers, *rows, case.slots, case.width))
        for _ in range(n_arrays)
    ]
    for cache in caches:
        cache[..., case.position :, :] = 100.0
    of_rows = np.arange(case.batch)[:, None, None] + np.arange(case.heads)[:, None]
    seen = (np.arange(case.slots) * 7 + of_rows) % 3 == 1
    return DecodeInputs(
        q=normal(case.dtype, *rows, case.group, case.width),
        new=[normal(case.dtype, *rows, 1, case.width, times=scale) for _ in range(n_arrays)],
        caches=[jnp.asarray(cache.astype(case.cache)) for cache in caches],
        value_width=case.value_width or case.width,
        layer=1,
        position=jnp.int32(case.position),
        scale=case.width**-0.5 / scale,
        window=case.window,
        is_chunked=case.is_chunked,
        sinks=normal("float32", case.heads, case.group) if case.has_sinks else None,
        mask=jnp.asarray(seen) if case.has_mask else None,
    )


STATIC = ("value_width", "scale", "window", "is_chunked", "softcap", "n_tokens")


@partial(jax.jit, static_argnames=STATIC)
def _interpreted(**values: Any) -> Any:
    return decode_attention(DecodeInputs(**values), mean_context=1, is_interpreted=True)


def interpreted(inputs: DecodeInputs) -> Any:
    """The output and the new caches of the kernel; one program for all positions."""
    return _interpreted(**{f.name: getattr(inputs, f.name) for f in fields(inputs)})


def check_close(case: Case, got: Any, expected: np.ndarray) -> None:
    tolerance = TOLERANCES[case.dtype] * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=tolerance, rtol=0)


def written(inputs: DecodeInputs) -> list[Any]:
    """The caches with the new position in layer 1; as they are if they have it already."""
    if not inputs.new:
        return list(inputs.caches)
    caches = [np.array(cache) for cache in inputs.caches]
    for cache, new in zip(caches, inputs.new, strict=True):
        cache[1, :, :, int(inputs.position)] = np.asarray(new)[:, :, 0].astype(cache.dtype)
    return [jnp.asarray(cache) for cache in caches]


@partial(jax.jit, static_argnames=("window", "is_chunked", "scale"))
def _plain(  # noqa: PLR0917  arrays, then what is static
    q: Any,
    keys: Any,
    values: Any,
    position: Any,
    mask: Any,
    sinks: Any,
    *,
    scale: float,
    **options: Any,
) -> Any:
    visible = causal_mask(position[None], jnp.arange(keys.shape[1]), **options)
    if mask is not None:
        visible = visible & mask[:, :, None]
    return dot_product_attention(
        q, keys, values, visible, AttentionScores(scale=scale, sinks=sinks)
    )


def plain(case: Case, inputs: DecodeInputs) -> np.ndarray:
    """Plain attention [B, K, G, V] of the query to layer 1."""
    arrays = [
        np.asarray(cache)[1].swapaxes(1, 2).astype(inputs.q.dtype) for cache in written(inputs)
    ]
    keys, values = arrays[0], arrays[-1][..., : inputs.value_width]
    q = inputs.q.reshape(case.batch, 1, -1, case.width)
    sinks = None if inputs.sinks is None else inputs.sinks.reshape(-1)
    masks = {"window": case.window, "is_chunked": case.is_chunked}
    out = _plain(q, keys, values, inputs.position, inputs.mask, sinks, scale=inputs.scale, **masks)
    return np.asarray(out, np.float32).reshape(case.batch, case.heads, case.group, -1)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_decode_attention_equals_plain_attention(case: Case) -> None:
    inputs = random_inputs(case)
    out, *caches = interpreted(inputs)
    check_close(case, out, plain(case, inputs))
    for got, cache in zip(caches, written(inputs), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(cache, np.float32))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in WRITTEN else pytest.mark.matrix)
        for case in CASES
    ],
)
def test_a_position_that_an_earlier_layer_wrote_counts_once(case: Case) -> None:
    """Layers that share a cache attend to it as it is, and return none."""
    inputs = random_inputs(case)
    (out,) = interpreted(replace(inputs, caches=written(inputs), new=[]))
    check_close(case, out, plain(case, inputs))


@pytest.mark.parametrize("case", cases(__file__, Case, "tokens"), ids=lambda c: c.name)
def test_each_of_several_tokens_attends_to_its_own_positions(case: Case) -> None:
    """The output of each is that of a step of its own, although the cache has the later tokens."""
    n_tokens, every = 4, replace(random_inputs(case), new=[])
    queries = jnp.concatenate([every.q * (1 + token) for token in range(n_tokens)], axis=2)
    tiled = None if every.sinks is None else jnp.tile(every.sinks, (1, n_tokens))
    caches = random_inputs(case._replace(position=case.position + 1)).caches
    inputs = replace(every, q=queries, sinks=tiled, caches=caches, n_tokens=n_tokens)

    (out,) = interpreted(inputs)

    for token in range(n_tokens):
        position = jnp.int32(case.position - n_tokens + 1 + token)
        single = replace(every, q=every.q * (1 + token), caches=caches, position=position)
        got = out[:, :, token * case.group : (token + 1) * case.group]
        check_close(case, got, plain(case, single))


def stated_cost(inputs: DecodeInputs, mean_context: float, **options: bool) -> tuple[int, int, str]:
    """FLOPs and bytes that the kernel states, and its traced text."""
    kernel = partial(decode_attention, inputs, mean_context=mean_context, **options)
    text = str(jax.make_jaxpr(kernel)())
    flops, n_bytes = re.search(r"CostEstimate\(flops=(\d+), .*?bytes_accessed=(\d+)", text).groups()
    return int(flops), int(n_bytes), text


def test_the_kernel_states_the_cost_of_the_mean_context() -> None:
    """Three blocks of 512 keys, and a tile of 32 rows that is written."""
    sizes = {"heads": 2, "group": 4, "width": 128, "slots": 2048, "batch": 8, "cache": "int8"}
    inputs = random_inputs(Case("cost", 0, **sizes))
    flops, n_bytes, text = stated_cost(inputs, 1100.5, is_interpreted=True)
    assert flops == 2 * (8 * 2 * 4 * 1536) * 256
    assert n_bytes == 8 * 2 * (1536 + 32) * 256 + 4 * 8 * 2 * 4 * 256
    assert "name=decode_attention_b4_k512_block" in text


def test_the_stated_bytes_include_the_padding_of_rows() -> None:
    """576 channels of a latent take 640, in 1024 slots that are fetched and a tile of 16 written."""
    sizes = {"heads": 1, "group": 4, "width": 576, "value_width": 512, "slots": 1024}
    case = Case("cost", 0, **sizes, cache="bfloat16")
    _, n_bytes, _ = stated_cost(random_inputs(case, n_layers=1), 900)
    assert n_bytes == case.batch * (1024 + 16) * 640 * 2 + 4 * case.batch * 4 * (576 + 512)
