"""The search against brute force: every plan through the public prediction, one by one."""

import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest
from made import space_with
from tables import table

import meshscope
from meshscope.cost.predicted import predicted_times
from meshscope.errors import MeshscopeError
from meshscope.model.config import read_model
from meshscope.plans.chunks import ChunkRule
from meshscope.plans.experiment import first_layers
from meshscope.plans.memory import FitState
from meshscope.plans.workload import MAX_BATCH, Workload
from meshscope.serving import grid as grid_module
from meshscope.serving.grid import SECONDS, WHOLE, SearchProgress, SecondProcess, grid_of
from meshscope.serving.objective import Goal, objective_of, pareto_front
from meshscope.serving.search import EXCHANGE, PlanSearch, ranked, search
from meshscope.serving.space import SearchSpace, parse_batches, plan_space

SIZES = (1, 2, 4)


def _searched(
    model: str, topology: str, *, slo: str | None = None, goal: Goal = Goal.THROUGHPUT, **space: Any
) -> PlanSearch:
    return search(space_with(model, topology, **space), objective_of(slo, goal))


def _brute_force(model: str, topology: str, batch: int) -> dict[str, meshscope.Run]:
    """Every plan of four devices that `meshscope.predict` accepts, by its canonical name."""
    runs: dict[str, meshscope.Run] = {}
    sizes = [each for each in product(SIZES, repeat=4) if prod(each) == 4]
    for (pp, data, cp, tp), axis, ep, sp in product(sizes, ("dp", "fsdp"), SIZES, ("", ",sp")):
        plan = f"pp={pp},{axis}={data},cp={cp},tp={tp},ep={ep}{sp}"
        with suppress(MeshscopeError):
            run = meshscope.predict(model, topology=topology, plan=plan, batch=batch, prompt=1024)
            runs[str(run.experiment.plan)] = run
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"])
def test_the_space_and_the_winner_are_those_of_brute_force(model: str) -> None:
    runs = _brute_force(model, "v6e:2x2", batch=8)
    space = plan_space(read_model(model), 4, prompt=1024)
    # Brute force writes sp=1 also for tp=1, where it changes nothing, and dp=1 as fsdp=1.
    legal = {str(plan) for plan in space.plans}
    assert legal == {name for name in runs if ",sp" not in name or "tp=" in name}
    fitting = [
        run
        for name, run in runs.items()
        if name in legal and run.memory and run.memory.fits is not False
        if 8 % run.experiment.plan.data_size == 0
    ]
    winner = _searched(model, "v6e:2x2", goal=Goal.LATENCY, batch="8").winner
    best_s = min(run.time.e2e_s or np.inf for run in fitting)
    assert winner.e2e_s == pytest.approx(best_s)
    time = runs[str(winner.experiment.plan)].time
    assert (winner.ttft_s, winner.tpot_s) == pytest.approx((time.ttft_s, time.tpot_s))


def _check_alone(grid: Any, at: int) -> None:
    prefill, decode = predicted_times(grid.experiment(at))
    assert grid.ttft_s[at] == pytest.approx(prefill.step.value_s, rel=1e-12)
    assert grid.tpot_s[at] == pytest.approx(decode.step.value_s, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "topology"), [("Qwen/Qwen3-30B-A3B", "v6e-8"), ("openai/gpt-oss-20b", "2xv6e:2x2")]
)
def test_candidates_have_the_times_of_their_plan_alone(model: str, topology: str) -> None:
    """Plans share costs and collectives in a search; alone, each computes all of them."""
    space = space_with(model, topology, dtypes=("bf16", "s8"))
    grid = grid_of(space)
    sample = np.random.default_rng(1).permutation(len(grid))[:60]
    for axis in ("pp", "fsdp"):
        assert {getattr(grid.plans[grid.plan[at]], axis) for at in sample} > {1}
    for at in sample:
        _check_alone(grid, at)


def test_plans_with_cp_have_chunks_and_whole_prompts_at_the_times_of_their_plan_alone() -> None:
    model = "meta-llama/Llama-3.1-8B"
    space = space_with(model, "v6e-4", batch="4", workload=Workload(prompt=65_536))
    grid = grid_of(space)
    plans = [grid.plans[plan] for plan in grid.plan]
    split = [at for at, plan in enumerate(plans) if plan.cp > 1 and plan.pp == 1]
    for at in split:
        _check_alone(grid, at)
    assert {int(grid.chunk[at]) for at in split} == {8192, WHOLE}
    at = min(split, key=lambda at: float(grid.ttft_s[at]))
    sizes = {"prompt": 65_536, "batch": 4}
    run = meshscope.predict(model, topology="v6e-4", plan=str(plans[at]), **sizes)
    assert run.time.ttft_s == pytest.approx(grid.ttft_s[at])


@pytest.mark.parametrize(
    ("n_rows", "n_values"), [(300, 12), pytest.param(6_000, 400, marks=pytest.mark.slow)]
)
def test_the_pareto_front_is_that_of_all_pairs(n_rows: int, n_values: int) -> None:
    figures = np.random.default_rng(1).integers(0, n_values, (n_rows, 3)).astype(float)
    beaten = (((figures <= row).all(axis=1) & (figures < row).any(axis=1)).any() for row in figures)
    expected = {tuple(row) for row, is_beaten in zip(figures, beaten, strict=True) if not is_beaten}
    front = pareto_front(figures)
    assert {tuple(figures[at]) for at in front} == expected
    assert len(front) == len(expected)  # one of equal rows


@pytest.mark.slow
def test_tp_over_all_chips_beats_two_replicas_at_small_batches() -> None:
    """Published decode steps of Llama-3.1-70B int8 on v5e-16, batch 8: TP16 6.29 ms, DP2 x TP8 11.85 ms.

    Source: jax-ml/jax-llm-examples, llama3 README.
    """
    model = "meta-llama/Llama-3.1-70B"
    result = _searched(model, "v5e-16", goal=Goal.LATENCY, batch="8", dtypes=("s8",))
    assert result.winner.experiment.plan.tp == 16
    sizes = {"batch": 8, "prompt": 1024, "weight_dtype": "s8", "cache_dtype": "s8"}
    replicas = meshscope.predict(model, topology="v5e-16", plan="dp=2,tp=8", **sizes)
    assert replicas.time.tpot_s / result.winner.tpot_s == pytest.approx(11.85 / 6.29, rel=0.15)


@pytest.mark.slow
def test_an_objective_that_nothing_meets_names_what_comes_closest() -> None:
    options = {"topology": "v6e-8", "slo": "ttft=0.001,tpot=0.0001"}
    result = meshscope.plan("Qwen/Qwen3-32B", **options)
    assert result.winner is None
    assert result.search.closest.tpot_s > 0.0001
    text = repr(result)
    assert "no plan meets TTFT 1 ms, TPOT 100 us" in text
    assert "times the limit of TTFT and" in text
    assert "--topology v6e searches other slices" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"ttft": 0.01, "tpot": 0.01}, {"tpot": 0.003}])
def test_limits_that_nothing_meets_show_the_nearest_plans(limits: dict[str, float]) -> None:
    """There was no table: --top N printed nothing."""
    slo = ",".join(f"{name}={limit}" for name, limit in limits.items())
    result = meshscope.plan("Qwen/Qwen3-32B", topology="v6e-8", batch=64, slo=slo)
    nearest = result.search.nearest
    excess = [max(getattr(one, f"{n}_s") / s for n, s in limits.items()) for one in nearest]
    assert excess == sorted(excess)
    assert excess[0] > 1
    plans = [str(one.experiment.plan) for one in nearest]
    assert len(set(plans)) == len(plans) > 3
    lines = "\n".join(result.lines(n_rows=3)).splitlines()
    (head,) = (n for n, line in enumerate(lines) if line.startswith("plan    "))
    assert lines[head].endswith("".join(f" / {name.upper()}" for name in limits))
    for line, plan, one in zip(lines[head + 1 : head + 4], plans, nearest, strict=False):
        assert line.startswith(f"{plan} ")
        ratios = [f"{getattr(one, f'{n}_s') / s:.3g}x" for n, s in limits.items()]
        assert line.split()[-len(ratios) :] == ratios
    assert lines[head + 4].startswith("no choice meets the limits")
    assert [row["plan"] for row in result.as_dict()["nearest"]] == plans
    assert max(map(len, lines)) <= 80


def test_a_model_that_fits_no_plan_has_no_closest_choice() -> None:
    result = _searched("deepseek-ai/DeepSeek-V3.1-Base", "v6e-8")
    assert (result.winner, result.closest) == (None, None)
    assert sum(result.n_refused.values()) == result.n_counted


def test_limits_are_in_seconds_or_milliseconds() -> None:
    for slo in ("ttft=500ms,tpot=30ms", "tpot=3e-2"):
        assert objective_of(slo).tpot_s == pytest.approx(0.03)


@pytest.mark.slow
def test_the_answer_stays_within_80_columns() -> None:
    result = meshscope.plan("Qwen/Qwen3-30B-A3B", topology="v6e-8", slo="ttft=2,tpot=0.2")
    lines = "\n".join(result.lines()).splitlines()
    assert lines[1].startswith("best for request tokens/s per chip within TTFT 2 s")
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.slow
def test_the_format_of_the_checkpoint_wins_unless_another_is_faster_beyond_errors() -> None:
    """fp8 weights of Qwen3-32B-FP8 have as many bytes as int8; those of Qwen3-32B in bf16 have twice as many."""
    model = read_model("Qwen/Qwen3-32B-FP8")
    result = meshscope.plan(model.name, topology="v6e-8", batch=8, slo="ttft=2,tpot=0.05")
    winner, *others = result.search.front
    assert winner.experiment.workload.weight_dtype == model.default_weight_dtype
    assert others[0].tokens_per_s_per_chip > winner.tokens_per_s_per_chip
    assert result.search.own_format is None
    text = "\n".join(result.lines(n_rows=12))
    assert "converts the checkpoint" not in text
    assert text.count("tok/s/chip\n") == 1
    dense = meshscope.plan("Qwen/Qwen3-32B", topology="v6e-8", batch=16)
    assert dense.winner.experiment.workload.weight_dtype == "s8"
    assert dense.search.own_format is not None
    assert "weights int8: converts the checkpoint, which has bf16" in repr(dense)


@pytest.mark.slow
def test_an_exchange_under_other_axes_is_one_reason() -> None:
    result = meshscope.plan("openai/gpt-oss-120b", topology="v6e-8", batch=64, output=512)
    won_by = result.search.won_by
    assert won_by.seconds
    axes = [key for key in won_by.seconds if key.startswith("communication over ")]
    assert not [key for key in axes if "dp" in key]
    large = sorted(won_by.seconds, key=lambda key: -abs(won_by.seconds[key]))
    assert EXCHANGE not in large[:1]


@pytest.mark.slow
def test_plans_that_equal_the_winner_are_named() -> None:
    result = meshscope.plan("Qwen/Qwen3-32B", topology="v6e-8", slo="ttft=0.5,tpot=0.03")
    assert "dp=2,tp=4" in {str(choice.experiment.plan) for choice in result.search.equals}
    text = repr(result)
    assert "equal within errors that they do not share: 'dp=2,tp=4,sp'" in text
    assert "what differs: over 'dp=2,tp=4,sp'" in text
    assert "why it wins" not in text


MILLION = """
import re, sys, time
import meshscope
reports = []
result = meshscope.plan(
    "Qwen/Qwen3-30B-A3B", topology="v6e-16", batch="8:6144:8", prefill_chunk="1024,2048,off",
    weight_dtype="bf16,s8,s4", cache_dtype="bf16,s8,f8e4m3fn", slo="ttft=2,tpot=0.05",
    progress=lambda *report: reports.append(report),
)
peak_kib = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(result.search.n_candidates, result.search.n_combinations, int(peak_kib) // 1024, reports[0][1])
"""


def _mixtures(batch: str = "8:64:8") -> SearchSpace:
    space = space_with("Qwen/Qwen3-30B-A3B", "v6e-8", batch=batch, dtypes=("bf16", "s8"))
    return replace(space, chunks=(512, 8192, ChunkRule.OFF))


@pytest.mark.slow
def test_every_counted_combination_is_predicted_or_left_out_with_a_reason() -> None:
    space = _mixtures("64:4096:64")
    grid = grid_of(space)
    n_by_hand = sum(
        1
        for plan, batch, _ in product(grid.plans, range(64, 4097, 64), range(2 * 2 * 3))
        if batch % plan.data_size == 0
    )
    assert space.n_combinations == n_by_hand
    assert len(grid) + sum(grid.n_pruned.values()) == n_by_hand
    assert len(grid.n_pruned) > 1
    assert all(n > 0 for n in grid.n_pruned.values())


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "value"), [("GROUP_STEPS", 100), ("SHARED", 1)])
def test_small_groups_and_two_processes_find_the_same_candidates_to_the_last_digit(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = _mixtures()
    whole = grid_of(space)
    monkeypatch.setattr(grid_module, "n_available_cores", lambda: 2)
    monkeypatch.setattr(grid_module, limit, value)
    with SecondProcess() as second:
        parts = grid_of(space, None, second)
    for name in ("plan", "weight_dtype", "cache_dtype", "batch", "chunk", "ttft_s", "tpot_s"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    assert (parts.n_pruned, parts.n_refused) == (whole.n_pruned, whole.n_refused)


class Bounded(NamedTuple):
    model: str
    topology: str
    prompt: int = 1024
    batch: str = "32"
    n_layers: int | None = None


FAMILIES = [
    Bounded("meta-llama/Llama-3.1-8B", "v5e-8", prompt=4096),
    Bounded("deepseek-ai/DeepSeek-V2-Lite", "v6e-4"),
    Bounded("deepseek-ai/DeepSeek-V4.1-Flash", "v5p:2x2x1", n_layers=4),
    Bounded("openai/gpt-oss-20b", "2xv5p:2x1x1", prompt=4096),
    Bounded("Qwen/Qwen3-30B-A3B", "tpu7x:2x2x1", batch="8:16"),
    Bounded("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "v4:2x2x1"),
    Bounded("google/gemma-3-1b-it", "h100:8", prompt=512),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.model)
def test_no_floor_exceeds_its_time_and_a_search_with_floors_has_the_same_result(
    case: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are equal to the last digit: without limits, and with limits that half of the candidates meet, or none."""
    monkeypatch.setattr(grid_module, "SHARED", 1)
    sizes = {"batch": case.batch, "workload": Workload(prompt=case.prompt)}
    space = space_with(case.model, case.topology, dtypes=("bf16", "s8"), **sizes)
    if case.n_layers is not None:
        space = replace(space, model=first_layers(space.model, case.n_layers))
    exact, bounded = grid_of(space), grid_of(space, has_floors=True)
    for phase, name in SECONDS.items():
        times, floors = getattr(exact, name), getattr(bounded, name)
        assert (floors <= times).all()
        assert set(bounded.is_floor[phase][bounded.plan[floors < times]]) == {True}
    limits = f"ttft={np.median(exact.ttft_s):g},tpot={np.median(exact.tpot_s):g}"
    for slo, goal in ((None, Goal.THROUGHPUT), (limits, Goal.LATENCY), ("tpot=1e-5", Goal.LATENCY)):
        bounded, objective = grid_of(space, has_floors=True), objective_of(slo, goal)
        assert ranked(bounded, objective) == ranked(exact, objective)


@pytest.mark.slow
def test_a_candidate_fits_if_its_own_memory_does() -> None:
    """A search bisects the batches; each alone has the same answer."""
    space = replace(_mixtures("64:8192:64"), chunks=(2048,))
    grid = grid_of(space)
    sample = np.random.default_rng(1).permutation(len(grid))[:300]
    expected = [grid.memory(at).fit in {FitState.YES, FitState.UNKNOWN} for at in sample]
    assert [grid.fits(at) for at in sample] == expected
    assert set(expected) == {True, False}


@pytest.mark.slow
def test_a_million_pairs_are_ranked_within_half_a_gigabyte() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MILLION], capture_output=True, text=True, check=True
    )
    match = re.fullmatch(r"(\d+) (\d+) (\d+) (.*)\n", done.stdout)
    n_candidates, n_counted, peak_mib = map(int, match.groups()[:3])
    assert n_candidates > 1_000_000
    assert peak_mib < 512
    assert match[4] == f"229 plans and {n_counted:,} combinations on v6e:4x4"


def test_the_time_left_is_that_of_the_others_at_the_speed_so_far() -> None:
    now = iter([0.0, 1.0, 5.0, 6.0, 10.0])
    reports: list[tuple[str, str, float | None]] = []
    progress = SearchProgress(lambda *report: reports.append(report), clock=lambda: next(now))
    progress.counted("v6e:2x4", 44, 200_000)
    for _ in range(4):
        progress.add(25_000)
    progress.done()
    assert reports == [
        ("search", "44 plans and 200,000 combinations on v6e:2x4", None),
        ("search", "50,000 of 200,000 combinations", pytest.approx(15.0)),
        ("search", "100,000 of 200,000 combinations", pytest.approx(10.0)),
        ("search", "done", None),
    ]


@pytest.mark.slow
def test_a_short_search_reports_nothing_and_several_slices_have_no_time_left(monkeypatch) -> None:
    reports: list[tuple[str, float | None]] = []

    def result_of(topology: str):
        def progress(_, step: str, left_s: float | None) -> None:
            reports.append((step, left_s))

        return meshscope.plan(
            "Qwen/Qwen3-8B", topology=topology, slo="ttft=0.006", progress=progress
        )

    monkeypatch.setattr(grid_module, "REPORT_S", 60.0)  # also on a loaded machine
    result_of("v6e-8")
    assert not reports
    monkeypatch.setattr(grid_module, "REPORT_S", 0.0)
    first, last = result_of("v6e-4,v6e-8").slices.searches
    n = last.n_combinations
    done = (f"{n:,} of {n:,} combinations on v6e:2x4, slice 2 of 2", None)
    assert first.n_combinations > 0
    assert reports[-2:] == [done, ("done", None)]


@table
def test_batches_are_multiples_of_the_data_axis(batch, data_size, expected) -> None:
    """Times powers of two, or all within a range with a step."""
    assert list(parse_batches(batch).of(data_size)) == expected
    assert parse_batches(None).of(2048)[-1] <= MAX_BATCH  # of a workload
