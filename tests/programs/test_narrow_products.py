"""Products of 8-bit activations and weights, against NumPy and against `transformers`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases
from tiny_models import generated_logits, golden, tiny_experiment

from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.model.arrays import SCALE_SUFFIX
from meshscope.model.config import model_from_config
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Partitioner, Program
from meshscope.plans.weights import expert_weights
from meshscope.plans.workload import Workload
from meshscope.programs.jax.collectives import ShardMapCollectives, layout_of
from meshscope.programs.jax.experts import Experts
from meshscope.programs.jax.state import LayerWeights

# Float32 sums in another order differ by 1e-6. Where that moves a value to the next number of 8 bits, the logits of the
# sequence differ from then on; unrounded activations would change those of all sequences.
TOLERANCE = 2e-5
MEAN_ERROR = 0.05


def _rounded_product(x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Rows [R, D] rounded to int8, times their matrices [R, D, F] of int8, scaled by row and by channel."""
    factor = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    rounded = np.rint(x / factor).astype(np.int64)
    return np.einsum("rd,rdf->rf", rounded, values.astype(np.int64)) * factor * scale


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "converted"])
def test_8_bit_rows_of_experts_are_multiplied_as_integers(*, is_native: bool) -> None:
    """Two experts of [8, 4]; XLA's kernel takes both operands as they are, others convert both."""
    generator = np.random.default_rng(0)
    model = model_from_config(golden.CONFIGS["qwen3_moe"], name="tiny", source="test")
    assert model.moe is not None
    plan, specs = parse_plan("tp=1"), {w.name: w for w in expert_weights(model)}
    arrays: dict[str, np.ndarray] = {}
    for name, shape in zip(specs, ((2, 8, 4), (2, 8, 4), (2, 4, 8)), strict=True):
        arrays[name] = generator.integers(-127, 128, shape).astype(np.int8)
        scale = generator.uniform(0.005, 0.02, (2, shape[-1])).astype(np.float32)
        arrays[name + SCALE_SUFFIX] = scale
    experts = Experts(
        moe=model.moe,
        weights=LayerWeights(
            arrays={name: jnp.asarray(array) for name, array in arrays.items()},
            specs=specs,
            collectives=ShardMapCollectives(
                plan=plan, layout=layout_of(plan, Workload(), Phase.PREFILL)
            ),
            dtype=jnp.float32,
            stored_as="s8_w8a8",
            kernel_dtypes=(jnp.int8,) if is_native else (),
            narrow_dtype=jnp.int8,
        ),
        has_kernel=is_native,
    )
    rows, of_row = generator.normal(size=(5, 8)).astype(np.float32), [0, 0, 1, 1, 1]

    got = experts(jnp.asarray(rows), jnp.array([2, 3]))

    def expected(x: np.ndarray, letter: str) -> np.ndarray:
        name = f"experts_w_{letter}"
        return _rounded_product(x, arrays[name][of_row], arrays[name + SCALE_SUFFIX][of_row])

    gate, up = expected(rows, "gate"), expected(rows, "up")
    inner = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
    np.testing.assert_allclose(got, expected(inner, "down"), rtol=1e-5, atol=1e-6)
    program = str(jax.make_jaxpr(experts)(rows, np.array([2, 3])))
    assert ("i32[8,4] = ragged_dot_general" in program) == is_native


class Case(NamedTuple):
    name: str
    plan: str
    loop: Loop


@pytest.mark.parametrize(
    ("name", "plan", "loop"),
    [
        *cases(__file__, Case, "usual"),
        *(pytest.param(*c, marks=pytest.mark.matrix) for c in cases(__file__, Case, "matrix")),
    ],
)
def test_8_bit_activations_give_the_logits_of_rounded_ones(
    name: str, plan: str, loop: Loop
) -> None:
    """`transformers` with matrices dequantized, and the inputs of each product rounded for each device."""
    weights, prompt, expected = golden.read_golden(name)
    config, dtype, _ = golden.NARROW[name]
    experiment = tiny_experiment(config, plan, Program(loop=loop), weight_dtype=f"{dtype}_w8a8")

    tokens = expected[:-1].argmax(axis=-1).T
    got = np.stack(list(generated_logits(experiment, weights, prompt, tokens)))

    errors = np.abs(got - expected).max(axis=-1)  # [step, sequence]
    assert np.median(errors) < TOLERANCE
    assert np.mean(errors) < MEAN_ERROR


def test_the_auto_partitioner_is_refused() -> None:
    program = Program(partitioner=Partitioner.AUTO)
    with pytest.raises(SpecError, match=r"Use --partitioner manual\."):
        tiny_experiment("qwen3", "tp=2", program, weight_dtype="s8_w8a8")
