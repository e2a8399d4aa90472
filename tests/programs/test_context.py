"""Attention over a sequence split by cp equals attention over the whole sequence."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tables import table

from meshscope.events.enums import Phase
from meshscope.plans.caches import ContextForm
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload
from meshscope.programs.jax.attention import (
    AttentionInputs,
    AttentionScores,
    PrefillKernel,
    dot_product_attention,
    partial_attention,
)
from meshscope.programs.jax.collectives import layout_of
from meshscope.programs.jax.context_parallel import Context
from meshscope.programs.jax.numerics import causal_mask

N_PROMPT, N_OUTPUT = 24, 11
OUTPUTS = range(N_PROMPT, N_PROMPT + N_OUTPUT)


def _context(size: int, phase: Phase, **changes: Any) -> Context:
    fields = {"form": ContextForm.RING, "n_prompt": N_PROMPT, **changes}
    return Context(size=size, phase=phase, **fields)


@pytest.mark.parametrize(("n_positions", "n_best"), [(40, 7), (5, 9), (64, 64)])
def test_top_k_breaks_ties_by_position(n_positions: int, n_best: int) -> None:
    """Nine distinct values make ties at the cut; compares with a stable sort."""
    scores = np.random.default_rng(0).integers(0, 9, (3, 4, n_positions)).astype(np.float32)
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :n_best]
    expected = np.zeros(scores.shape, bool)
    np.put_along_axis(expected, best, values=True, axis=-1)

    got = _context(1, Phase.PREFILL).top_k_mask(jax.numpy.asarray(scores), n_best)

    assert (np.asarray(got) == expected).all()


def _mapped(function: Any, size: int, spec: Any, *arrays: Any) -> Any:
    """The results of the function on each device of cp, of arrays that are split by the spec, too."""
    mesh = jax.make_mesh((size,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": spec if arrays else (), "out_specs": spec}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs, check_vma=False))(*arrays)


def _on_each(function: Any, size: int) -> np.ndarray:
    """The results of `function()` on each device of cp, [size, ...]."""
    return np.asarray(_mapped(lambda: function()[None], size, P("cp")))


def _over_outputs(function: Any) -> Any:
    """The results of `function` for each position of the output, all in one program."""
    return jax.vmap(lambda position: function(position[None]))(jax.numpy.array(OUTPUTS))


@pytest.mark.parametrize(("size", "n_chunk"), [(2, None), (4, None), (8, None), (2, 8), (4, 12)])
@pytest.mark.parametrize(
    ("window", "is_chunked"), [(None, False), (1, False), (5, False), (23, False), (6, True)]
)
def test_decode_attends_to_the_slots_of_the_window(size, n_chunk, window, *, is_chunked) -> None:
    """Compares with the positions of all slots and the causal mask."""
    context = _context(size, Phase.DECODE, n_chunk=n_chunk)
    n_slots = N_PROMPT // size + -(-N_OUTPUT // size)
    held = _on_each(lambda: context.cache_positions(n_slots), size)
    slots = np.arange(n_slots)

    def share(position: Any) -> Any:
        got = context.share(position[0], window, is_chunked=is_chunked)
        return jax.numpy.stack([got.last, got.is_new_here, got.lowest])

    shares = _on_each(lambda: _over_outputs(share), size)
    for position, of_devices in zip(OUTPUTS, shares.swapaxes(0, 1), strict=True):
        for of_device, (last, is_new_here, lowest) in zip(held, of_devices, strict=True):
            mask = causal_mask(np.array([position]), of_device, window, is_chunked=is_chunked)
            assert (((slots >= lowest) & (slots <= last)) == np.asarray(mask)[0]).all()
            assert is_new_here == (position in of_device)
            assert not is_new_here or of_device[last] == position


@pytest.mark.parametrize("has_sinks", [False, True])
def test_partial_attention_merges_to_the_whole_with_fully_masked_parts(*, has_sinks: bool) -> None:
    """Three parts of 4 positions; the last two are masked for the first query."""

    random = np.random.default_rng(0)
    q, k, v = (
        random.normal(size=(2, *shape)).astype(np.float32)
        for shape in ((3, 4, 8), (12, 2, 8), (12, 2, 5))
    )
    sinks = random.normal(size=4).astype(np.float32) if has_sinks else None
    mask = causal_mask(np.array([2, 6, 11]), np.arange(12), 7)
    scores = AttentionScores(scale=0.3, sinks=sinks)
    parts = [
        partial_attention(q, k[:, i : i + 4], v[:, i : i + 4], mask[:, i : i + 4], scores)
        for i in (0, 4, 8)
    ]

    merged = parts[2].merged(parts[0]).merged(parts[1]).with_sinks(sinks).normalized(np.float32)

    whole = dot_product_attention(q, k, v, mask, scores)
    np.testing.assert_allclose(merged, whole, atol=1e-6)


def _attended(
    context: Context, arrays: tuple[Any, ...], positions: Any, *, sinks: Any, window: int | None
) -> Any:
    """Splash attention, interpreted, of local queries to keys and values; it needs no mask."""
    layout = layout_of(parse_plan("tp=1"), Workload(), Phase.PREFILL)

    def attend(q: Any, k: Any, v: Any) -> Any:
        inputs = AttentionInputs(
            q=q,
            keys=lambda k, v: (k, v),
            mask_of=lambda _: pytest.fail("the kernel needs no mask"),
            scores=AttentionScores(scale=0.1, sinks=sinks, window=window),
            kernel=PrefillKernel(layout=layout, is_interpreted=True),
        )
        return context.attend(inputs, (k, v), positions(q, k))

    return _mapped(attend, context.size, P(None, "cp"), *arrays)


def _expected(q: Any, k: Any, v: Any, *, sinks: Any, window: int | None) -> Any:
    """Plain attention of the last positions to all."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        keys = np.arange(k.shape[1])
        mask = causal_mask(keys[-q.shape[1] :], keys, window)
        return dot_product_attention(q, k, v, mask, AttentionScores(scale=0.1, sinks=sinks))

    return jax.jit(attend)(q, k, v)


@table
def test_kernel_attends_to_the_blocks_of_all_devices(
    form: ContextForm, size, n_local, window, *, has_sinks, monkeypatch
) -> None:
    """Splash attention, interpreted, on each device against plain attention to the whole prompt."""
    monkeypatch.setattr("meshscope.plans.kernel_choice.PADDED_FROM", 1)
    n_prompt, random = n_local * size, np.random.default_rng(0)
    arrays = [random.normal(size=(1, n_prompt, n, 128)).astype(np.float32) for n in (2, 1, 1)]
    options = {"sinks": random.normal(size=2).astype(np.float32) if has_sinks else None}
    options["window"] = window
    context = _context(size, Phase.PREFILL, form=form, n_prompt=n_prompt)
    got = _attended(context, arrays, lambda q, _: context.positions(0, q.shape[1]), **options)
    np.testing.assert_allclose(got, _expected(*arrays, **options), atol=2e-6, rtol=2e-6)


@table
def test_kernel_attends_to_the_chunks_before(size, n_local, n_before, window, monkeypatch) -> None:
    """The queries of a chunk behind `n_before` others, of which each device has a block, with sinks."""
    monkeypatch.setattr("meshscope.plans.kernel_choice.PADDED_FROM", 1)
    n_chunk, n_chunks, random = n_local * size, n_before + 1, np.random.default_rng(0)
    q, k, v = (
        random.normal(size=(2, n_chunk * n, n_heads, 128)).astype(np.float32)
        for n, n_heads in ((1, 2), (n_chunks, 1), (n_chunks, 1))
    )
    options = {"sinks": random.normal(size=2).astype(np.float32), "window": window}
    chunks = {"n_cached": n_chunk * n_before, "n_chunk": n_chunk}
    context = _context(size, Phase.PREFILL, n_prompt=n_chunk * (n_chunks + 1), **chunks)

    def by_device(x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(2, n_chunks, size, n_local, 1, 128).swapaxes(1, 2)
        return blocks.reshape(x.shape)

    arrays = (q, by_device(k), by_device(v))
    got = _attended(context, arrays, lambda _, k: context.cache_positions(k.shape[1]), **options)
    np.testing.assert_allclose(got, _expected(q, k, v, **options), atol=2e-6, rtol=2e-6)


def test_each_device_has_a_block_of_every_chunk() -> None:
    """Chunks of 8 positions over 4 devices: device 1 has positions 2, 3, 10, 11, 18, 19, then 25 and 29."""
    context = _context(4, Phase.DECODE, n_chunk=8)
    held = _on_each(lambda: context.cache_positions(8), 4)

    assert held[1].tolist() == [2, 3, 10, 11, 18, 19, 25, 29]
    assert sorted(held.flatten()) == list(range(32))
