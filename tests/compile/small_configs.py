"""Small models, with a layer of each kind that their families have, and the plans of the tests for all of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tables import stored

from meshscope.model.config import model_from_config
from meshscope.model.model import Model
from meshscope.plans.program import Loop

TABLES: dict[str, Any] = stored(Path(__file__).with_suffix(".yaml"))
BASE: Mapping[str, Any] = TABLES["base"]
CONFIGS: Mapping[str, Mapping[str, Any]] = TABLES["configs"]
FEW_AXES: Mapping[str, Any] = TABLES["few_axes"]


def small_model(name: str, n_layers: int | None = None) -> Model:
    """A model of CONFIGS, with as many layers as its config has or as given."""
    config = {**BASE, "model_type": name.partition("-")[0], **CONFIGS[name]}
    n_layers = n_layers or config["num_hidden_layers"]
    for key in {"layer_types", "layers_block_type", "swiglu_limits", "swiglu_limits_shared"} & {
        *config
    }:
        config[key] = config[key][:n_layers]
    config["num_hidden_layers"] = n_layers
    return model_from_config(config, name=f"small-{name}", source="test")


# Together they have every axis in loops over layers and in unrolled layers, alone and beside pp and cp.
PLANS = [
    ("dp=4,tp=2,sp", Loop.UNROLL),
    ("fsdp=4,tp=2", Loop.SCAN),
    ("cp=2,dp=2,tp=2", Loop.SCAN),
    ("pp=2,dp=2,tp=2,sp", Loop.SCAN),
    ("pp=2,cp=2,tp=2", Loop.UNROLL),
]
EXPERT_PLANS = [
    ("dp=2,tp=4,ep=8", Loop.UNROLL),
    ("dp=4,tp=2,ep=8,sp", Loop.SCAN),
    ("fsdp=8,ep=8", Loop.SCAN),
    ("pp=2,cp=2,tp=2,ep=2", Loop.UNROLL),
]
OTHER_PLAN = "fsdp=2,cp=2,tp=2"  # unrolled, on one of these slices
OTHER_SLICES = ("v5p-16", "v5e-8", "tpu7x-8", "v4-16")


def plans_of(name: str) -> list[tuple[str, Loop]]:
    """The plans of a small model on v6e-8, and whether its layers are scanned."""
    has_experts = small_model(name).moe is not None
    return PLANS + EXPERT_PLANS if has_experts else PLANS
