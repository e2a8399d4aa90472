"""Experiments in one line."""

from collections.abc import Callable
from typing import Any

import pytest
from made import experiment_with

from meshscope.hardware.topology import parse_topology
from meshscope.model.config import model_from_config, read_model
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Engine, Program

MakeExperiment = Callable[..., Experiment]


@pytest.fixture
def small() -> Model:
    """Two layers; D64 F96 N8 K2 H8 V101: tp=4 pads the vocabulary and replicates KV heads."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 101,
    }
    return model_from_config(config, name="small", source="test")


@pytest.fixture
def make() -> MakeExperiment:
    """An experiment on as many devices as the plan needs, or on `topology`."""

    def make_experiment(
        model: Model | str,
        plan: str,
        *,
        topology: str | None = None,
        engine: Engine = Engine.MESHSCOPE,
        program: Program | None = None,
        **workload: Any,
    ) -> Experiment:
        parsed = parse_plan(plan)
        slice_ = parse_topology(topology or f"cpu:{parsed.n_devices}")
        return experiment_with(
            read_model(model) if isinstance(model, str) else model,
            parsed,
            slice_,
            **workload,
            program=program,
            engine=engine,
        )

    return make_experiment
