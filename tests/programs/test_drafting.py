"""The head that drafts equals a one-layer model whose embeddings are the joined inputs, computed with NumPy."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from tables import cases
from tiny_models import TOLERANCE, empty_cache, golden, tiny_experiment

from meshscope.events.enums import Phase
from meshscope.model.config import model_from_config
from meshscope.model.mechanisms.drafts import DraftHead
from meshscope.model.model import Model
from meshscope.programs.jax.build import build_program
from meshscope.programs.jax.values import placed_weights

PROMPT, N_STEPS = 8, 3


class Case(NamedTuple):
    config: str
    plan: str
    has_norms: bool  # of multi-token prediction


CASES = [
    *cases(__file__, Case, "usual"),
    *(pytest.param(case, marks=pytest.mark.matrix) for case in cases(__file__, Case, "matrix")),
]


def head_of(case: Case) -> tuple[Model, dict[str, np.ndarray]]:
    """The last layer of a tiny model as a draft, and its weights by the names of the first layer."""
    model = model_from_config(golden.CONFIGS[case.config], name="tiny", source="test")
    weights, _, _ = golden.read_golden(case.config)
    last, width = f"model.layers.{model.n_layers - 1}.", model.hidden
    named = {name.replace(last, "model.layers.0."): value for name, value in weights.items()}
    generator = np.random.default_rng(0)
    named |= {
        "model.layers.1.eh_proj.weight": generator.normal(0, 0.3, (width, 2 * width)),
        "model.layers.1.enorm.weight": generator.normal(1, 0.1, width),
        "model.layers.1.hnorm.weight": generator.normal(1, 0.1, width),
    }
    head = DraftHead(has_norms=case.has_norms)
    return replace(model, layers=model.layers[-1:], draft_head=head), named


def joined(
    model: Model, weights: dict[str, np.ndarray], tokens: np.ndarray, hidden: np.ndarray
) -> np.ndarray:
    """The inputs [B, D] of the layer (DeepSeek-V3, equation 21), in float64."""
    embedded = weights["model.embed_tokens.weight"][tokens].astype(np.float64)
    parts = []
    for name, values in (("enorm", embedded), ("hnorm", hidden.astype(np.float64))):
        scale = 1 / np.sqrt((values**2).mean(axis=-1, keepdims=True) + model.norm_eps)
        normed = values * scale * weights[f"model.layers.1.{name}.weight"]
        parts.append(normed if model.draft_head and model.draft_head.has_norms else values)
    return np.concatenate(parts, axis=-1) @ weights["model.layers.1.eh_proj.weight"].T


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_head_drafts_like_a_layer_on_the_joined_inputs(case: Case) -> None:
    """Its tokens and hidden states are the inputs of its next step."""
    model, weights = head_of(case)
    plain = tiny_experiment(replace(model, draft_head=None), "tp=1", prompt=PROMPT, output=8)
    layer = build_program(plain, Phase.DECODE, jax.devices()[:1])
    arrays: dict[str, Any] = placed_weights(plain, layer, weights.__getitem__)
    drafting = tiny_experiment(model, case.plan, prompt=PROMPT, output=8)
    head = build_program(drafting, Phase.DECODE, jax.devices()[: drafting.plan.n_devices])
    placed = placed_weights(drafting, head, weights.__getitem__)
    cache, head_cache = empty_cache(layer), empty_cache(head)
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, model.vocab, golden.BATCH).astype(np.int32)
    hidden = generator.normal(0, 1, (golden.BATCH, model.hidden)).astype(np.float32)
    for position in range(N_STEPS):
        inputs = joined(model, weights, tokens, hidden)
        table = np.zeros((model.vocab, model.hidden), np.float32)
        table[: golden.BATCH] = inputs  # token i of the plain layer is sequence i
        at = np.int32(PROMPT + position)  # behind a prompt of zeros in the cache
        rows = np.arange(golden.BATCH, dtype=np.int32)[:, None]
        _, expected, cache = layer.step({**arrays, "embed": table}, rows, cache, at)
        drafted = {"tokens": tokens[:, None], "hidden": hidden[:, None]}
        out, logits, head_cache = head.step(placed, drafted, head_cache, at)
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
        tokens, hidden = np.asarray(out["tokens"]), np.asarray(out["hidden"])
