"""Kernels interpreted on a CPU equal the implementation without kernels."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from tables import read_cases

from meshscope.events.enums import Phase
from meshscope.model.mechanisms.mixture import Activation, MixtureOfExperts, Scoring
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload
from meshscope.programs.jax.attention import (
    AttentionScores,
    Band,
    PrefillKernel,
    dot_product_attention,
)
from meshscope.programs.jax.collectives import layout_of
from meshscope.programs.jax.experts import Experts
from meshscope.programs.jax.numerics import causal_mask

# Outputs are means of values of order 1. In float32 only the order of sums differs; in
# bfloat16 (8 bits) the plain path rounds the weights, the kernel the scaled queries.
TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2}


class Case(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    width: int = 64
    value_width: int = 64
    positions: int = 256
    window: int | None = None
    has_sinks: bool = False
    softcap: float | None = None
    dtype: str = "float32"


CASES = read_cases(Path(__file__).parent / "splash_attention_cases.csv", Case)


def arrays(case: Case, batch: int = 2) -> list[Any]:
    """Random queries, keys, values and sinks with a fixed seed."""
    random = np.random.default_rng(0)
    shapes = [
        (batch, case.positions, case.heads, case.width),
        (batch, case.positions, case.kv_heads, case.width),
        (batch, case.positions, case.kv_heads, case.value_width),
        (case.heads,),
    ]
    return [random.normal(size=shape).astype(case.dtype) for shape in shapes]


def scores_of(case: Case, sinks: Any) -> AttentionScores:
    return AttentionScores(
        scale=case.width**-0.5,
        window=case.window,
        softcap=case.softcap,
        sinks=sinks if case.has_sinks else None,
    )


def plain(case: Case, q: Any, k: Any, v: Any, sinks: Any) -> np.ndarray:
    def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        positions = jnp.arange(case.positions)
        mask = causal_mask(positions, positions, case.window)
        return dot_product_attention(q, k, v, mask, scores_of(case, sinks))

    return np.asarray(jax.jit(attend)(q, k, v, sinks), np.float32)


def by_kernel(case: Case, inputs: list[Any]) -> np.ndarray:
    layout = layout_of(parse_plan("tp=1"), Workload(), Phase.PREFILL)
    kernel = PrefillKernel(layout=layout, is_interpreted=True)
    attend = jax.jit(lambda *a: kernel(*a[:3], scores_of(case, a[3])))
    return np.asarray(attend(*inputs), np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_splash_attention_equals_plain_attention(case: Case) -> None:
    inputs, tolerance = arrays(case), TOLERANCES[case.dtype]
    got, expected = by_kernel(case, inputs), plain(case, *inputs)
    np.testing.assert_allclose(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_with_the_auto_partitioner_each_device_computes_its_heads(*, has_sinks: bool) -> None:
    case = Case("auto", 8, 4, positions=128, has_sinks=has_sinks)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    layout = layout_of(parse_plan("dp=2,tp=4"), Workload(batch=2), Phase.PREFILL)
    kernel = PrefillKernel(layout=layout, mesh=mesh, is_interpreted=True)
    inputs = arrays(case)

    got = jax.jit(lambda *a: kernel(*a[:3], scores_of(case, a[3])))(*inputs)

    assert got.sharding.spec[:3] == ("dp", None, "tp")
    np.testing.assert_allclose(got, plain(case, *inputs), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("n_cached", [128, 384])
def test_splash_attention_of_a_chunk_equals_the_last_rows_of_the_whole(n_cached: int) -> None:
    case = Case("chunk", 4, 2, positions=512, window=200)
    q, k, v, sinks = arrays(case)
    got = by_kernel(case, [q[:, n_cached:], k, v, sinks])
    expected, tolerance = plain(case, q, k, v, sinks)[:, n_cached:], TOLERANCES[case.dtype]
    np.testing.assert_allclose(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("n_cached", [0, 128, 384])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
def test_the_band_mask_gives_the_kernel_of_the_masks_of_jax(
    window: int | None, n_cached: int
) -> None:
    shape, sizes = (512 - n_cached, 512), (None if window is None else window - 1, 0)
    made = [
        splash.make_splash_mha_single_device(masks.MultiHeadMask([mask] * 2)).fwd_mask_info
        for mask in (
            Band(shape, window=window, offset=n_cached, n_keys=512),
            masks.LocalMask(shape, sizes, offset=n_cached),
        )
    ]
    for ours, theirs in zip(*made, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class _Weights(dict[str, Any]):
    """LayerWeights without a plan; stacked weights are [layers, e, ...]."""

    layer: int | None = None
    narrow_dtype: Any = None
    dtype: Any = jnp.float32

    def __call__(self, name: str) -> Any:
        return self[name] if self.layer is None else self[name][self.layer]

    def kernel_operand(self, name: str, most: int) -> tuple[Any, int | None]:
        if self.layer is None or not most:
            return self(name), None
        array = self[name]
        return array.reshape(-1, *array.shape[2:]), self.layer * array.shape[1]

    def scale(self, name: str) -> None:
        """The weights have no scales."""


def _random_experts(*stack: int) -> tuple[Experts, Any]:
    """Four experts with random weights, and nine rows."""
    moe = MixtureOfExperts(
        n_experts=4, n_active=2, ffn=8, shared_ffn=None, scoring=Scoring.SOFTMAX,
        is_normalized=True, activation=Activation.SWIGLU,
    )  # fmt: skip
    random = np.random.default_rng(1)

    def normal(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    shapes = {"gate": (4, 16, 8), "up": (4, 16, 8), "down": (4, 8, 16)}
    weights = _Weights({f"experts_w_{n}": normal(*stack, *s) for n, s in shapes.items()})
    return Experts(moe=moe, weights=weights), normal(9, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [(3, 0, 2, 4), (0, 0, 0, 0), (1, 1, 1, 0)])
def test_padding_rows_to_a_tile_keeps_the_outputs_of_experts(counts: tuple[int, ...]) -> None:
    experts, rows = _random_experts()
    sizes = jnp.array(counts, jnp.int32)
    got = replace(experts, has_kernel=True)(rows, sizes)
    assert got.shape == (9, 16)
    np.testing.assert_allclose(got, experts(rows, sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_experts_read_in_place_from_a_stack_give_the_same_outputs(layer: int) -> None:
    experts, rows = _random_experts(3)
    experts.weights.layer, sizes = layer, jnp.array((3, 0, 2, 1), jnp.int32)
    in_place = replace(experts, has_kernel=True)
    np.testing.assert_allclose(in_place(rows, sizes), experts(rows, sizes), rtol=1e-5, atol=1e-5)
    text = str(jax.make_jaxpr(in_place)(rows, sizes))
    assert "f32[12,16,8] = reshape" in text  # the experts of all three layers
    assert "slice_sizes=(1, 4, 16, 8)" not in text
