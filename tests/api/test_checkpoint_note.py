"""Weights are in the format of the checkpoint, and a note says so or names another that is assumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from tables import stored, table

import meshscope
from meshscope.api.options import request_of
from meshscope.api.predict import predict
from meshscope.api.records import checkpoint_notes
from meshscope.api.request import CompileRequest
from meshscope.api.run import Run
from meshscope.errors import SpecError
from meshscope.model.catalog import catalog


def predicted(folder: Path, config: dict[str, Any], **options: Any) -> Run:
    path = folder / "config.json"
    path.write_text(json.dumps({**catalog()["Qwen/Qwen3-4B"].config, **config}))
    return predict(path, topology="v6e-8", plan="tp=4,dp=2", batch=2, layers=1, **options)


def notes(folder: Path, config: dict[str, Any], **options: Any) -> tuple[str, ...]:
    return predicted(folder, config, **options).warnings


FORMATS: dict[str, dict[str, Any]] = stored(Path(__file__).with_suffix(".yaml"))["formats"]
FP8, ODD, NF4, W8A8 = (
    {"quantization_config": FORMATS[name]} for name in ("fp8", "odd", "nf4", "w8a8")
)


@table
def test_the_format_of_the_checkpoint_and_the_assumed_one_are_named(tmp_path, config, options, end):
    (note,) = notes(tmp_path, config, **options)
    assert end in note


@table
def test_the_quantization_file_of_modelopt_counts(tmp_path: Path, algorithm: str, end: str) -> None:
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    (note,) = notes(tmp_path, {})
    assert note.endswith(end)


def test_a_cache_of_8_bits_is_named_unless_an_option_names_one(tmp_path: Path) -> None:
    """The checkpoint has scales for it, but servers decide."""
    beside = tmp_path / "hf_quant_config.json"
    stated = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    beside.write_text(json.dumps({"quantization": stated}))
    _, cache = notes(tmp_path, {})
    assert "has scales for a KV cache in fp8; bf16 is assumed. Use --cache-dtype fp8" in cache
    assert (
        len(notes(tmp_path, {}, cache_dtype="fp8"))
        == len(notes(tmp_path, {}, cache_dtype="bf16"))
        == 1
    )


def test_a_format_by_name_asks_for_the_config() -> None:
    run = predict("someone/Qwen3-4B-AWQ", topology="v6e-8", plan="tp=4,dp=2", batch=2, layers=1)
    assert any(
        note.endswith(
            "by its name (--weight-dtype int4). Give its config.json for what it leaves out"
        )
        for note in run.warnings
    )


def test_a_quantization_file_without_a_quantization_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(SpecError, match="Mend or remove the file"):
        notes(tmp_path, {})


def test_no_note_where_nothing_differs(tmp_path: Path) -> None:
    assert notes(tmp_path, {"torch_dtype": "bfloat16"}) == ()
    assert notes(tmp_path, {"dtype": "float16"}) == ()
    assert notes(tmp_path, {"torch_dtype": 3}) == ()
    assert notes(tmp_path, FP8, weight_dtype="fp8") == ()
    assert notes(tmp_path, {"torch_dtype": "float32"}, dtype="f32") == ()


@table
def test_weights_are_in_the_format_of_the_checkpoint_unless_an_option_names_one(
    tmp_path, config, options, expected
) -> None:
    workload = predicted(tmp_path, config, **options).experiment.workload
    dtypes = [workload.weight_dtype, workload.activation_dtype, workload.cache_dtype]
    assert dtypes == expected


@table
def test_activations_are_in_the_format_of_the_checkpoint_where_the_program_has_it(
    tmp_path, options, expected, note
) -> None:
    run = predicted(tmp_path, W8A8, **options)
    assert run.experiment.workload.weight_dtype == expected
    assert [note in text for text in run.warnings] == ([] if note is None else [True])


@table
def test_programs_without_8_bit_activations_keep_those_of_16_bits(
    tmp_path, model, options, expected
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**catalog()[model].config, **W8A8}))
    run = predict(path, topology="v6e-8", layers=1, **{"plan": "tp=8", **options})
    assert run.experiment.workload.weight_dtype == expected
    note = "here activations have 16 bits (--weight-dtype int8_layers)"
    assert [note in text for text in run.warnings][:1] == [expected == "s8_layers"]


@table
def test_formats_that_torchxla_has_no_modules_for_are_refused(tmp_path, options, text) -> None:
    with pytest.raises(SpecError, match=text):
        predicted(tmp_path, {}, frontend="torchxla", **options)


@table
def test_a_program_has_bf16_weights_where_it_lacks_the_format_of_the_checkpoint(options, text):
    values = {"model": "openai/gpt-oss-20b", "topology": "v6e-8", "batch": 8} | options
    request = request_of(CompileRequest, values)
    experiment = request.experiment()
    assert experiment.workload.weight_dtype == "bf16"
    (note,) = checkpoint_notes(request, experiment)
    assert note.partition(" in the experts")[2].lstrip(",; ").startswith(text)


def test_a_program_has_the_format_of_the_checkpoint_if_the_plan_keeps_its_groups() -> None:
    values = {"model": "openai/gpt-oss-20b", "topology": "v6e-8", "plan": "tp=8,ep=8"}
    experiment = request_of(CompileRequest, values).experiment()
    assert experiment.workload.weight_dtype == "f4e2m1fn_experts"


@table
def test_a_format_that_the_model_lacks_is_refused_with_a_remedy(tmp_path, weight_dtype, remedy):
    with pytest.raises(SpecError, match=remedy):
        notes(tmp_path, {}, weight_dtype=weight_dtype)


@pytest.mark.parametrize("topology", ["v5e-1", "h100:1"])
@pytest.mark.parametrize("config", [NF4, ODD, {"quantization_config": {"quant_method": "aqlm"}}])
def test_weights_in_an_assumed_format_are_no_lower_bound(tmp_path, config, topology) -> None:
    """Nor is a batch said not to fit: the checkpoint may need less."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**catalog()["meta-llama/Llama-3.1-405B"].config, **config}))
    fit = predict(path, topology=topology, plan="tp=1").as_dict()["fit"]
    assert fit["fits"] == "unknown"
    assert "at least" not in fit["text"]
    assert fit["reason"] == "the size of the weights in the checkpoint's own format is unknown"
    named = predict(path, topology=topology, plan="tp=1", weight_dtype="int8").as_dict()["fit"]
    assert named["fits"] == "no"


def test_nvfp4_is_counted_as_stored_and_no_program_multiplies_it(tmp_path: Path) -> None:
    """128 experts of 3 x 768 x 2048 in 3 layers: 4.5 bits each, 0.40 of 1.42 GiB in bf16."""
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    stored = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    path = tmp_path / "config.json"
    config = catalog()["Qwen/Qwen3-30B-A3B"].config
    path.write_text(json.dumps({**config, "num_hidden_layers": 3, "quantization_config": stored}))
    memory = predict(path, topology="h200:8", plan="tp=8,ep=8").memory
    experts = 3 * 128 * 3 * 768 * 2048 * 4.5 / 8 / 8
    assert experts < memory.weights_bytes < experts + 0.2e9  # with attention, embedding and head
    with pytest.raises(SpecError, match="Use mxfp4, which has a scale for 32 weights"):
        meshscope.compile(path, topology="v6e-8", plan="tp=8", weight_dtype="nvfp4")


def test_the_answer_names_a_format_that_is_counted_as_another(tmp_path: Path) -> None:
    """A saved run and its JSON lack what is printed while it is made."""
    (note,) = predicted(tmp_path, ODD).as_dict()["notes"]
    assert note.endswith("counted here as bf16")
