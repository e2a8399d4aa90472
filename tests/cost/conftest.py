"""Experiments in one line."""

from collections.abc import Callable
from typing import Any

import pytest
from made import experiment_with

from meshscope.model.config import model_from_config
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import parse_plan

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
        model: Model | str, plan: str, *, topology: str | None = None, **options: Any
    ) -> Experiment:
        devices = topology or f"cpu:{parse_plan(plan).n_devices}"
        return experiment_with(model, plan, devices, **options)

    return make_experiment
