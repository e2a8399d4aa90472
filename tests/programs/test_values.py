"""Random weights: an expert table has distinct expert IDs for each token."""

import jax
import numpy as np
import pytest
from tiny_models import golden

from meshscope.events.enums import Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import model_from_config
from meshscope.plans.experiment import experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload
from meshscope.programs.jax.build import build_program
from meshscope.programs.jax.values import _made, random_weights


@pytest.mark.parametrize(("n_experts", "n_active"), [(256, 6), (7, 3), (4, 4)])
def test_a_random_table_has_distinct_experts_for_each_token(n_experts: int, n_active: int) -> None:
    shape = (5000, n_active)
    table = np.asarray(
        _made(
            jax.numpy.uint32(3),
            name="router_table",
            shape=shape,
            dtype=np.int32,
            n_experts=n_experts,
        )
    )
    assert ((table >= 0) & (table < n_experts)).all()
    assert all(len(set(row)) == n_active for row in table.tolist())
    counts = np.bincount(table.ravel(), minlength=n_experts)
    assert counts.min() > 0.5 * counts.mean()


def test_random_weights_fill_the_expert_table_of_a_model() -> None:
    """The small DeepSeek-V4 of the golden logits, whose first layers choose experts by token ID."""
    config = golden.CONFIGS["deepseek_v4"]
    model = model_from_config(config, name="small", source="here")
    experiment = experiment_of(
        model=model,
        plan=parse_plan("tp=1"),
        topology=parse_topology("cpu:1"),
        workload=Workload(prompt=8, output=2, weight_dtype="f32", activation_dtype="f32"),
    )
    program = build_program(experiment, Phase.PREFILL, jax.devices()[:1])
    made = random_weights(program, seed=0, n_experts=model.moe.n_experts)
    leaves, _ = jax.tree.flatten_with_path(made)
    tables = [np.asarray(leaf) for path, leaf in leaves if "router_table" in str(path[-1])]
    assert tables
    for table in tables:
        assert table.dtype == np.int32
        assert set(np.unique(table)) == set(range(model.moe.n_experts))
