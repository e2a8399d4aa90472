"""Launch flags against the sizes of a plan."""

import shlex
from dataclasses import replace

import pytest
from made import experiment_with

import meshscope
from meshscope.plans.experiment import Experiment
from meshscope.serving.launch import Launch, launches_of


def _launches(
    plan: str, model: str = "Qwen/Qwen3-30B-A3B", n_layers: int | None = None, **sizes: str
) -> dict[str, Launch]:
    experiment: Experiment = experiment_with(
        model, plan, "v6e-8", batch=16, prompt=1024, output=128, **sizes
    )
    return {launch.server: launch for launch in launches_of(experiment, n_layers)}


def test_each_server_gets_the_sizes_in_its_own_counting() -> None:
    launches = _launches("dp=2,tp=4,ep=4")
    assert "--tensor-parallel-size 4 --data-parallel-size 2" in launches["vLLM on TPU"].command
    assert "--max-num-seqs 8" in launches["vLLM on TPU"].command  # of one rank
    assert "--tp-size 8 --dp-size 2 --ep-size 4" in launches["SGLang-JAX"].command
    assert "--max-running-requests 16" in launches["SGLang-JAX"].command
    assert "ici_expert_parallelism=4" in launches["MaxText"].command
    assert "per_device_batch_size=2" in launches["MaxText"].command
    assert "--plan dp=2,tp=4,ep=4 --batch 16" in launches["meshscope"].command


@pytest.mark.parametrize(
    ("plan", "missing"),
    [
        ("cp=2,tp=4", {"vLLM on TPU": "cp=2", "SGLang-JAX": "cp=2"}),
        ("pp=2,tp=4", {"SGLang-JAX": "pp=2"}),
        ("fsdp=8", {"vLLM on TPU": "fsdp=8", "SGLang-JAX": "fsdp=8"}),
        ("tp=4,dp=2,sp", {"vLLM on TPU": "sp", "SGLang-JAX": "sp"}),
        ("dp=2,tp=4,ep=8", {"vLLM on TPU": "ep=8 over dp", "MaxText": "ep=8"}),
    ],
)
def test_what_a_server_cannot_express_is_said(plan: str, missing: dict[str, str]) -> None:
    launches = _launches(plan)
    for server, text in missing.items():
        assert any(item.startswith(text) for item in launches[server].not_expressed)
    assert launches["meshscope"].not_expressed == ()


def test_every_flag_has_a_source() -> None:
    for launch in _launches("tp=8", weight_dtype="s8", cache_dtype="f8e4m3fn").values():
        assert launch.flags
        assert all(flag.source for flag in launch.flags)


def test_the_name_of_a_folder_with_a_space_is_one_word() -> None:
    experiment = experiment_with("Qwen/Qwen3-8B", "tp=8", "v6e-8")
    named = replace(experiment, model=replace(experiment.model, name="my model"))
    words = [shlex.split(launch.command) for launch in launches_of(named)[:3]]
    assert all("my model" in one for one in words)


def test_a_truncated_model_is_started_with_its_layers() -> None:
    whole, launches = _launches("tp=8"), _launches("tp=8", n_layers=4)
    flags = {
        "meshscope": "--layers 4",
        "vLLM on TPU": """--hf-overrides '{"num_hidden_layers": 4}' --load-format dummy""",
        "SGLang-JAX": """--json-model-override-args '{"num_hidden_layers": 4}' --load-format dummy""",
        "MaxText": "override_model_config=true base_num_decoder_layers=4",
    }
    for server, launch in launches.items():
        assert launch.command == f"{whole[server].command} {flags[server]}"
        missing = [text for text in launch.not_expressed if text.startswith("the weights of the")]
        assert len(missing) == (server != "meshscope")


def test_plan_says_how_to_start_a_truncated_model() -> None:
    result = meshscope.plan("Qwen/Qwen3-8B", topology="v6e-4", layers=4)
    text = "\n".join(result.lines(has_launch=True))
    assert text.startswith("Qwen/Qwen3-8B on v6e:2x2, the first 4 layers, prompt 1024")
    assert text.count("num_hidden_layers") == 2
    assert "base_num_decoder_layers=4" in text
    whole = meshscope.plan("Qwen/Qwen3-8B", topology="v6e-4", layers=36)
    assert "layers" not in whole.as_dict()["launch"][0]["command"]
