"""Random expert tables have distinct expert IDs for each token; scores of chosen experts are no gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_experiment

from meshscope.events.enums import Phase
from meshscope.programs.jax.build import build_program
from meshscope.programs.jax.experts import chosen_scores
from meshscope.programs.jax.values import _made, random_weights


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
