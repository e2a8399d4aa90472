"""Products of a single row, random expert tables and the scores of chosen experts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made import experiment_with
from tiny_models import DTYPES, empty_cache, tiny_experiment

from meshscope.events.enums import Phase
from meshscope.model.config import read_model
from meshscope.programs.jax.build import GPU_MIN_ROWS, build_program
from meshscope.programs.jax.experts import chosen_scores
from meshscope.programs.jax.matrix import Matrix
from meshscope.programs.jax.values import _made, random_weights


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


@pytest.mark.parametrize(("n_experts", "n_active"), [(256, 6), (7, 3), (4, 4)])
def test_a_random_table_has_distinct_experts_for_each_token(n_experts: int, n_active: int) -> None:
    facts = {"shape": (5000, n_active), "dtype": np.int32, "n_experts": n_experts}
    table = np.asarray(_made(jnp.uint32(3), name="router_table", **facts))
    assert ((table >= 0) & (table < n_experts)).all()
    assert all(len(set(row)) == n_active for row in table.tolist())
    counts = np.bincount(table.ravel(), minlength=n_experts)
    assert counts.min() > 0.5 * counts.mean()


def test_random_weights_fill_the_expert_table_of_a_model() -> None:
    """The small DeepSeek-V4 of the golden logits, whose first layers choose experts by token ID."""
    experiment = tiny_experiment("deepseek_v4", "tp=1", batch=1, prompt=8, output=2)
    model = experiment.model
    program = build_program(experiment, Phase.PREFILL, jax.devices()[:1])
    made = random_weights(program, seed=0, n_experts=model.moe.n_experts)
    leaves, _ = jax.tree.flatten_with_path(made)
    tables = [np.asarray(leaf) for path, leaf in leaves if "router_table" in str(path[-1])]
    assert tables
    for table in tables:
        assert table.dtype == np.int32
        assert set(np.unique(table)) == set(range(model.moe.n_experts))


def test_chosen_scores_are_exact_and_gather_nothing() -> None:
    """TPUs would gather them element by element."""
    scores = jax.random.uniform(jax.random.key(0), (16, 128), jnp.float32)
    experts = jax.lax.top_k(scores, 8)[1]
    expected = jnp.take_along_axis(scores, experts, axis=-1)
    assert np.array_equal(chosen_scores(scores, experts), expected)
    assert "gather" not in str(jax.make_jaxpr(chosen_scores)(scores, experts))
