"""Flax models compile as they are, of linen and of nnx: their collectives have the lines of the model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P
from programs import SLICE, array

import meshscope

pytestmark = [pytest.mark.slow, pytest.mark.tpu]

X = array(64, 256, spec=P("dp"))
MESH = "dp=2,tp=2"


class LinenMlp(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = linen.relu(linen.Dense(512, use_bias=False, dtype=jnp.bfloat16, name="up")(x))
        return linen.Dense(256, use_bias=False, dtype=jnp.bfloat16, name="down")(hidden)


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(256, 512, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(512, 256, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def places(run: meshscope.Run) -> list[tuple[str, str | None, str]]:
    """Kind, axis and the source text of every collective."""
    return [
        (row.kind.value, row.axis, text_at(str(row.source_line)))
        for row in run.record.rows
        for _ in range(row.count)
    ]


def text_at(place: str) -> str:
    file, _, line = place.rpartition(":")
    assert file == __file__
    return Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1].strip()


def test_linen_parameters_with_shardings() -> None:
    model = LinenMlp()
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((64, 256), jnp.bfloat16))
    specs = {"up": {"kernel": P(None, "tp")}, "down": {"kernel": P("tp")}}
    params = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec),
        shapes,
        {"params": specs},
    )
    run = meshscope.compile(model.apply, params, X, topology=SLICE, mesh=MESH)
    down = 'return linen.Dense(256, use_bias=False, dtype=jnp.bfloat16, name="down")(hidden)'
    assert places(run) == [("all_reduce", "tp", down)]


def test_gradients_of_an_nnx_model() -> None:
    def gradients(model: NnxMlp, x: jax.Array) -> nnx.State:
        return nnx.grad(lambda m: jnp.mean(m(x)))(model)

    run = meshscope.compile(gradients, NnxMlp(nnx.Rngs(0)), X, topology=SLICE, mesh=MESH)
    line = "return self.down(nnx.relu(self.up(x)))"
    assert places(run) == [("all_reduce", "dp", line)] * 2
