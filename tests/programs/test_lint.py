"""Correct programs of several devices, in which nothing certain may be found: every device may have a part of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope

pytestmark = pytest.mark.slow
COLUMNS, ROWS, WHOLE = P(None, "tp"), P("tp", None), P()
SHAPES = {COLUMNS: (16, 64), ROWS: (64, 32), WHOLE: (32,)}


def groups(x: Any, w: Any, b: Any) -> Any:
    """A layer whose groups of columns have weights of their own, one group on each device."""
    return x @ w + b


def activated(x: Any, w: Any, b: Any) -> Any:
    whole = jax.nn.gelu(x @ w + 2 * b)
    return jax.lax.all_gather(whole, "tp", axis=1, tiled=True)


def normed(x: Any) -> Any:
    """A norm over the columns of each device, as heads and groups of state spaces have."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6)


def softmax_with_sink(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.softmax(x @ w + b, axis=-1)


def scaled_bias(x: Any, w: Any, b: Any) -> Any:
    return jax.lax.psum(x @ w + b / 8, "tp")


def largest(x: Any) -> Any:
    return jax.lax.pmax(jnp.sum(x, 1), "tp")


@pytest.mark.parametrize(
    ("function", "inputs", "result"),
    [
        (groups, (COLUMNS, ROWS, WHOLE), COLUMNS),
        (activated, (COLUMNS, ROWS, WHOLE), WHOLE),
        (normed, (COLUMNS,), COLUMNS),
        (softmax_with_sink, (COLUMNS, ROWS, WHOLE), COLUMNS),
        (scaled_bias, (COLUMNS, ROWS, WHOLE), WHOLE),
        (largest, (COLUMNS,), WHOLE),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_nothing_certain_is_found_in_a_correct_program(
    function: Callable[..., Any], inputs: tuple[P, ...], result: P, tmp_path: Path
) -> None:
    assert linted(function, inputs, result, tmp_path).n_certain == 0


def test_a_sum_of_what_the_program_computed_is_certain(tmp_path: Path) -> None:
    def residual(x: Any, w: Any, b: Any) -> Any:
        stream = jax.lax.psum(jnp.sum(x, 1, keepdims=True), "tp") + b
        return jnp.tanh(stream + x @ w)

    (finding,) = linted(residual, (COLUMNS, ROWS, WHOLE), COLUMNS, tmp_path).findings
    assert (finding.kind, finding.axis, finding.is_certain) == ("missing_reduction", "tp", True)


def test_a_partial_sum_that_is_returned_is_possible(tmp_path: Path) -> None:
    """Each device may return a part of its own: the text does not say how its result is split."""
    (finding,) = linted(lambda x, w: x @ w, (COLUMNS, ROWS), WHOLE, tmp_path).findings
    assert (finding.kind, finding.is_certain) == ("missing_reduction", False)


def linted(function: Callable[..., Any], inputs: tuple[P, ...], result: P, folder: Path) -> Any:
    """The findings in the program over eight virtual devices."""
    mesh = jax.make_mesh((8,), ("tp",), devices=jax.devices("cpu")[:8])
    mapped = jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=result, check_vma=False)
    arguments = [
        jax.ShapeDtypeStruct(SHAPES[one], jnp.float32, sharding=NamedSharding(mesh, one))
        for one in inputs
    ]
    text = folder / "program.txt"
    text.write_text(jax.jit(mapped).lower(*arguments).compile().as_text())
    return meshscope.lint(text, mesh="tp=8")
