"""Placements of a plan on the torus: which axis has which dimension."""

import shlex
from dataclasses import replace

import pytest
from made import experiment_with

import meshscope
from meshscope.cost.memory import predicted_memory
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment
from meshscope.plans.workload import Workload
from meshscope.serving.grid import grid_of
from meshscope.serving.launch import Launch, launches_of
from meshscope.serving.objective import Goal, Objective
from meshscope.serving.search import GridRanking, plans_of, search_placements, with_placements
from meshscope.serving.space import SearchSpace, parse_batches


def _experiment(topology: str, plan: str) -> Experiment:
    return experiment_with("Qwen/Qwen3-8B", plan, topology, batch=8, prompt=1024, output=128)


def test_mesh_order_is_one_of_the_placements() -> None:
    """On v6e:2x4, device ids count x first: two rows of two chips are the tp groups."""
    searched = search_placements(_experiment("v6e:2x4", "dp=2,tp=4"))
    same = next(one for one in searched.placed if str(one.placement) == "y:dp=2,tp=2,x:tp=2")
    assert list(same.devices) == list(range(8))
    assert same.e2e_s == searched.in_order.e2e_s


def test_groups_of_distant_chips_take_longer() -> None:
    searched = search_placements(_experiment("v6e:4x4", "dp=4,tp=4"))
    seconds = {str(one.placement): one.ttft_s for one in searched.placed}
    assert seconds["y:tp=2,dp=2,x:tp=2,dp=2"] > 1.05 * seconds["y:dp=2,tp=2,x:dp=2,tp=2"]
    assert searched.best is None or searched.best.e2e_s < searched.in_order.e2e_s


def test_mesh_order_has_the_predicted_times() -> None:
    result = meshscope.plan("Qwen/Qwen3-8B", topology="v6e-8", batch=8)
    in_order = result.search.placements.in_order
    assert in_order.e2e_s == pytest.approx(result.winner.e2e_s, rel=1e-12)
    text = " ".join(repr(result).split())
    assert "placement: " in text
    document = result.as_dict()["placement"]
    assert document["n_tried"] == len(document["placements"])


@pytest.mark.parametrize(("topology", "plan"), [("v6e:2x4", "tp=8"), ("h100:8", "dp=2,tp=4")])
def test_one_axis_or_no_torus_has_no_other_placement(topology: str, plan: str) -> None:
    assert search_placements(_experiment(topology, plan)) is None


def test_a_faster_placement_replaces_mesh_order() -> None:
    """The exchange over all 256 chips of DeepSeek-V3.1 is 3% of a request faster in rows and columns."""
    space = SearchSpace(
        model=read_model("Qwen/Qwen3-8B"),
        topology=parse_topology("v6e-8"),
        workload=Workload(batch=1, prompt=1024, output=128),
        batches=parse_batches("8"),
        weight_dtypes=("bf16",),
        cache_dtypes=("bf16",),
    )
    grid = grid_of(space, plans_of(space))
    ranking = GridRanking(grid=grid, objective=Objective(goal=Goal.LATENCY))
    options = {"batch": 256, "prompt": 1024, "output": 128, "weight_dtype": "f8e4m3fn"}
    model, plan = "deepseek-ai/DeepSeek-V3.1", "dp=16,tp=16,ep=256"
    in_order = experiment_with(model, plan, "v6e:16x16", **options)
    choice = ranking.priced(in_order, predicted_memory(in_order))
    small = ranking.priced(_experiment("v6e-8", "dp=2,tp=4"), choice.memory)

    front, best, searches = with_placements(ranking, (choice,), (choice, small))

    placed = next(c for c in best if c.experiment.plan == in_order.plan)
    assert 0.96 < placed.e2e_s / choice.e2e_s < 0.98
    assert placed.tokens_per_s_per_chip > choice.tokens_per_s_per_chip
    assert small in best  # mesh order is as fast as any placement of it
    assert best[0] is small
    assert best[0] in front
    result = searches[in_order.plan]
    assert result.best.experiment == placed.experiment
    command = launches_of(placed.experiment)[0].command
    assert f"--device-order {result.best.placement}" in command


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
