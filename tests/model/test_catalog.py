"""Built-in models with their sizes, and what ids of checkpoints say."""

from pathlib import Path

import pytest
from tables import stored, table

from meshscope.model.catalog import catalog, catalog_ids, nearest_ids
from meshscope.model.config import read_model
from meshscope.plans.plan import Plan
from meshscope.plans.weights import device_weight_bytes


@table
def test_parameter_count_equals_the_published_one(model, n_billions, error_frac) -> None:
    """A few per cent separate a wrong geometry from rounding."""
    n_parameters = device_weight_bytes(read_model(model), Plan(), "bf16") / 2
    assert n_parameters == pytest.approx(n_billions * 1e9, rel=error_frac)


def test_every_model_has_a_source_a_context_and_a_published_size() -> None:
    sizes = stored(Path(__file__).with_suffix(".yaml"))[
        test_parameter_count_equals_the_published_one.__name__
    ]
    assert {row[0] for row in sizes[1:]} == set(catalog())
    assert all(name == entry.name and entry.source for name, entry in catalog().items())
    ids = catalog_ids()
    models = [read_model(name) for name in ids]
    assert [model.name for model in models] == list(ids)
    assert [model.name for model in models if model.max_position is None] == []
    assert len(ids) == len({name.lower() for name in ids})


@table
def test_variants_have_their_own_context(name: str, n_positions: int) -> None:
    """max_position_embeddings of their config.json at huggingface.co."""
    assert read_model(name).max_position == n_positions


@table
def test_weights_are_in_the_format_of_the_checkpoint(name: str, weight_dtype: str) -> None:
    assert read_model(name).default_weight_dtype == weight_dtype


@table
def test_ids_that_are_near_are_suggested(name: str, sentence: str) -> None:
    assert nearest_ids(name, "none") == sentence


def test_a_format_of_the_name_alone_is_marked() -> None:
    """The config of a listed id is known; that of another may leave matrices out."""
    assert read_model("Qwen/Qwen3-32B-AWQ").stored_as == "4-bit awq"
    assert read_model("someone/Qwen3-32B-AWQ").stored_as == "4-bit awq, by its name"
    assert read_model("unsloth/Qwen3-32B").stored_as is None
