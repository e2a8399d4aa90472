"""Scores of chosen experts, which TPUs would gather element by element."""

import jax
import jax.numpy as jnp
import numpy as np

from meshscope.programs.jax.experts import chosen_scores


def test_chosen_scores_are_exact_and_gather_nothing() -> None:
    scores = jax.random.uniform(jax.random.key(0), (16, 128), jnp.float32)
    experts = jax.lax.top_k(scores, 8)[1]
    expected = jnp.take_along_axis(scores, experts, axis=-1)
    assert np.array_equal(chosen_scores(scores, experts), expected)
    assert "gather" not in str(jax.make_jaxpr(chosen_scores)(scores, experts))
