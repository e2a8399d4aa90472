"""The closed form against published steps on real TPUs; docs/time.md has the distribution."""

import sys
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from meshscope.cost.closed_form import closed_steps, plan_batch, plan_form
from meshscope.cost.efficiency import PEAKS
from meshscope.cost.features import Cost
from meshscope.cost.predicted import predicted_times
from meshscope.events.enums import Phase
from meshscope.spec.experiment import experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.workload import Workload

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from accuracy_published import compared_steps, is_ranked, ranked_pairs
from published_steps import Half, closed_time, published_steps

STEPS = published_steps()


@pytest.mark.parametrize("half", [Half.FITTED, Half.HOLDOUT])
def test_errors_are_those_in_the_documentation(half: Half) -> None:
    errors = [
        abs(closed_time(step).value_s / step.device_s - 1) for step in STEPS if step.half is half
    ]
    assert len(errors) >= 9
    assert median(errors) < 0.07
    assert sorted(errors)[-2] < 0.13  # without the fused kernel of experts
    assert max(errors) < 0.26


def test_errors_of_unseen_steps_are_those_in_the_documentation() -> None:
    errors = {
        step.id: closed_time(step).value_s / step.device_s - 1
        for step in STEPS
        if step.half is Half.UNSEEN
    }
    assert len(errors) >= 20
    assert median(map(abs, errors.values())) < 0.12
    beyond_host = {name for name, error in errors.items() if abs(error) > 0.28}
    assert beyond_host == {"sgl-oct-q3moe-epmoe-D-c32-i4096"}


@pytest.mark.parametrize(
    ("name", "limit"), [("sgl-q7b-tp1-P-c128-i1024", 0.03), ("sgl-oct-q32b-tp4-P-c32-i4096", 0.09)]
)
def test_compiled_prefills_of_unseen_models_are_nearer_than_the_closed_form(
    name: str, limit: float
) -> None:
    step = next(step for step in compared_steps() if step.published.id == name)
    assert step.compiled is not None
    error = abs(step.compiled.value_s / step.published.device_s - 1)
    assert error < limit
    assert error < abs(step.error)


@pytest.mark.parametrize(
    ("name", "floor_ms"),
    [("sgl-oct-q3moe-epmoe-D-c32-i4096", 10.3), ("sgl-q7b-tp1-D-c8-i1024", 9.1)],
)
def test_host_time_leaves_less_than_the_bytes_of_two_unseen_steps_take(
    name: str, floor_ms: float
) -> None:
    step = next(step for step in STEPS if step.id == name)
    chip = step.experiment.topology.chip
    form = plan_form(step.experiment, step.phase, efficiency=PEAKS)
    workload = step.experiment.workload
    sizes = {n: np.array([float(getattr(workload, n))]) for n in ("batch", "prompt", "output")}
    costs = closed_steps(plan_batch([form]), np.zeros(1, dtype=np.int64), **sizes).costs[0]
    read = costs[:, [Cost.WEIGHT_BYTES, Cost.CHOSEN_BYTES, Cost.CACHE_BYTES]].sum()
    floor_s = float(read) / (chip.hbm_bytes_per_s or 1)
    assert floor_s * 1e3 == pytest.approx(floor_ms, abs=0.05)
    assert step.device_s < 1.01 * floor_s


def test_intervals_contain_the_published_times_and_are_narrow() -> None:
    steps = [step for step in STEPS if step.half in {Half.FITTED, Half.HOLDOUT}]
    times = [closed_time(step) for step in steps]
    is_inside = [
        time.lower_s <= step.device_s <= time.upper_s
        for step, time in zip(steps, times, strict=True)
    ]
    assert sum(is_inside) >= 0.9 * len(steps)
    assert median((time.upper_s - time.lower_s) / 2 / time.value_s for time in times) < 0.25


@pytest.mark.parametrize(
    "step", [s for s in STEPS if s.half is Half.BOUND], ids=lambda step: step.id
)
def test_device_is_faster_than_a_server_that_waits_for_its_host(step) -> None:
    assert 0.3 * step.published_s < closed_time(step).value_s < step.published_s


def _step_s(plan: str, batch: int, phase: Phase) -> float:
    experiment = experiment_of(
        model=read_model("meta-llama/Llama-3.1-70B"),
        plan=parse_plan(plan),
        topology=parse_topology("v5e:4x4"),
        workload=Workload(batch=batch, prompt=2048, output=2, weight_dtype="s8", cache_dtype="s8"),
    )
    return {time.phase: time.step.value_s for time in predicted_times(experiment)}[phase]


def _ratio(batch: int, phase: Phase) -> float:
    """Llama-3.1-70B in int8 on v5e-16: two replicas over tp=8, relative to tp=16."""
    return _step_s("dp=2,tp=8", batch, phase) / _step_s("tp=16", batch, phase)


def test_plans_rank_as_published() -> None:
    """Decode steps/s and seconds of prefill: jax-llm-examples@8b4b246, llama3/README.md."""
    assert _ratio(8, Phase.DECODE) == pytest.approx(159 / 84.4, rel=0.1)
    assert _ratio(128, Phase.DECODE) < 1
    assert _ratio(8, Phase.PREFILL) == pytest.approx(1 / 1.6, rel=0.1)


def test_all_steps_of_a_model_rank_as_published() -> None:
    """But for two kernels of experts of one server, which have one prediction."""
    pairs = ranked_pairs()
    assert len(pairs) >= 100
    wrong = [(fast, slow) for fast, slow in pairs if not is_ranked(fast, slow)]
    assert len(wrong) == 5
    for fast, slow in wrong:
        assert slow.predicted.value_s == fast.predicted.value_s
        assert fast.published.experiment == slow.published.experiment


@pytest.mark.parametrize(("chip", "is_known"), [("v6e", True), ("v5p", False)])
def test_a_chip_without_published_steps_says_so(chip: str, is_known: bool) -> None:  # noqa: FBT001
    experiment = experiment_of(
        model=read_model("Qwen/Qwen3-8B"),
        plan=parse_plan("tp=4"),
        topology=parse_topology({"v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}[chip]),
        workload=Workload(batch=8, prompt=1024),
    )
    time = predicted_times(experiment)[0]
    assert any(f"none of {chip} is known" in note for note in time.notes) is not is_known
