"""Products of a single row: padded, as for GPUs, or with a matrix of two dims."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made import experiment_with
from tiny_models import DTYPES, empty_cache

from meshscope.events.enums import Phase
from meshscope.model.config import read_model
from meshscope.programs.jax.build import GPU_MIN_ROWS, build_program
from meshscope.programs.jax.matrix import Matrix
from meshscope.programs.jax.values import random_weights


def _logits(topology: str) -> np.ndarray:
    """The logits of one decode step of the program for this slice, run on a CPU device."""
    model = replace(read_model("Qwen/Qwen3-4B"), vocab=1024)
    sizes = {"batch": 1, "prompt": 4, "output": 4, "n_layers": 1}
    experiment = experiment_with(model, "tp=1", topology, **dict.fromkeys(DTYPES, "f32"), **sizes)
    program = build_program(experiment, Phase.DECODE, jax.devices()[:1])
    weights = random_weights(program, seed=0)
    compiled = program.lower().compile()
    cache = jax.device_put(empty_cache(program), compiled.input_formats[0][2])
    out = compiled(weights, np.ones((1, 1), np.int32), cache, np.int32(4))
    return np.asarray(program.logits(out))


def test_the_decode_step_for_gpus_gives_the_same_logits() -> None:
    assert GPU_MIN_ROWS > 1
    np.testing.assert_allclose(_logits("h200:1"), _logits("cpu:1"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("n_rows", "of_matrix"), [(1, (4, 6)), (2, (4, 2, 3))], ids=["one row", "two rows"]
)
def test_the_matrix_of_a_single_row_has_two_dims(n_rows: int, of_matrix: tuple[int, ...]) -> None:
    """Vector units take a register for each input and row of outputs, if these have several dims."""
    x, values = jnp.arange(4.0 * n_rows).reshape(n_rows, 1, 4), jnp.arange(24.0).reshape(4, 2, 3)
    matrix = Matrix(values=values, scale=None, outputs=(1, 2), dtype=jnp.float32)

    def product(x: jax.Array) -> jax.Array:
        return matrix.einsum("bsd,dnh->bsnh", x)

    jaxpr = jax.make_jaxpr(product)(x).jaxpr
    (dot,) = [eqn for eqn in _equations(jaxpr) if eqn.primitive.name == "dot_general"]
    assert of_matrix in [operand.aval.shape for operand in dot.invars]
    np.testing.assert_allclose(product(x), np.einsum("bsd,dnh->bsnh", x, values))


@pytest.mark.parametrize("has_scale", [False, True])
def test_a_single_group_of_heads_keeps_its_dim(*, has_scale: bool) -> None:
    """DeepSeek-V4 projects groups of heads, of which a device may have one: that is no output of its own."""
    x, values = jnp.arange(4.0).reshape(1, 1, 1, 4), jnp.arange(12.0).reshape(4, 1, 3)
    scale = jnp.full((1, 3), 2.0) if has_scale else None
    matrix = Matrix(values=values, scale=scale, outputs=(1, 2), dtype=jnp.float32)

    expected = np.einsum("bsgi,igr->bsgr", x, values) * (2 if has_scale else 1)
    np.testing.assert_allclose(matrix.einsum("bsgi,igr->bsgr", x), expected)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a function and of those that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _equations(inner.jaxpr)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_of_a_table_have_the_scales_that_share_a_row_with_others(dtype: str) -> None:
    """16 rows of 256 numbers have 8 scales each in a row of 128, from the smallest exponent to the largest."""
    random = np.random.default_rng(5)
    values = random.integers(-448, 448, (64, 256)).astype(jnp.float8_e4m3fn)
    exponents = random.integers(118, 130, (64, 8), dtype=np.uint8)
    exponents[5], exponents[37] = 113, 134
    index = jnp.array([5, 37, 0, 63, 16, 15, 5])
    of = [
        Matrix(
            values=jnp.asarray(values), scale=jnp.asarray(scale), outputs=(0,), dtype=dtype
        ).rows(index)
        for scale in (exponents, exponents.reshape(4, 128))
    ]
    expected = values.astype(np.float32) * np.exp2(exponents.astype(int) - 127.0).repeat(32, 1)
    for rows in of:
        np.testing.assert_array_equal(rows, expected[index].astype(dtype))
