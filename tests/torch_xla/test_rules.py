"""Rules and layouts follow the plan's own weights; configs are the inverse of the reader."""

import json

import pytest
from tables import table

from meshscope.errors import SpecError
from meshscope.model.catalog import catalog
from meshscope.model.config import model_from_config, read_model
from meshscope.plans.plan import parse_plan
from meshscope.programs.torchxla.configs import hugging_face_config
from meshscope.programs.torchxla.layouts import layouts_of, rules_of


@pytest.mark.parametrize("name", sorted(catalog()))
def test_config_reads_back_as_the_same_model_or_is_refused(name: str) -> None:
    model = read_model(name)
    if not model.family.traits.is_traced:
        with pytest.raises(
            SpecError, match=rf"no program for the family {model.family}: .*--frontend jax"
        ):
            hugging_face_config(model)
        return
    config = json.loads(json.dumps(hugging_face_config(model)))
    assert model_from_config(config, name=model.name, source=model.source) == model


@table
def test_rule_splits_what_the_plan_says(
    model, plan, parameter, shape: tuple[int, ...], spec: tuple[tuple[str, ...], ...]
) -> None:
    described, parsed = read_model(model), parse_plan(plan)
    rule = rules_of(described, parsed, "bf16")[f"model.{parameter}"]
    assert rule.spec(shape, layouts_of(described, parsed)) == spec
