"""The floor of a step and the causes beyond it, from figures that are easy to divide."""

from dataclasses import replace
from random import Random

import pytest
from made import estimate, experiment_with, part_cost, step_time

from meshscope.analysis.roofline import (
    OTHER,
    PADDING,
    ROUNDING,
    SLOW_HBM,
    SORTING,
    BindingResource,
    step_floor,
)
from meshscope.cost.predicted import predicted_times, with_default_chunk
from meshscope.errors import MeshscopeError
from meshscope.events.enums import Phase
from meshscope.events.step_time import Activity, ActivityTime
from meshscope.hardware.chips import chip_of
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment import Experiment

V5E = chip_of("v5e")  # 819 GB/s, 197 TFLOP/s, four links of 45 GB/s
ATTN = part_cost(
    "attn",
    3e-3,
    collective_s=1e-3,
    exposed_s=1e-3,
    flops=1.97e11,
    hbm_bytes=8.19e8,
    wire_bytes=1.8e8,
)
MLP = part_cost("mlp", 2e-3, flops=1.97e11, hbm_bytes=4 * 8.19e8, wire_bytes=0.0)
STEP = step_time(
    Phase.DECODE,
    estimate(6.5e-3),
    5e-3,
    exposed_s=1e-3,
    idle_s=0.5e-3,
    collective_s=1e-3,
    exposed_by_axis_s={"tp": 1e-3},
    parts=(ATTN, MLP),
    activities=(
        ActivityTime(
            activity=Activity.MATMUL,
            seconds=4e-3,
            hbm_busy_s=3.5e-3,
            flops=3.94e11,
            padding_flops=1.97e11,
        ),
        ActivityTime(activity=Activity.SMALL, seconds=1e-3, hbm_busy_s=0.8e-3),
        ActivityTime(
            activity=Activity.EXPOSED, axis="tp", seconds=1e-3, hbm_busy_s=0.6e-3, wire_bytes=1.8e8
        ),
        ActivityTime(activity=Activity.COPY, seconds=0.5e-3, hbm_busy_s=0.5e-3),
    ),
)


def test_bounds_are_work_over_peak_rates() -> None:
    floor = step_floor(STEP, V5E)
    assert (floor.hbm_s, floor.compute_s, floor.link_s) == pytest.approx((5e-3, 2e-3, 1e-3))
    assert (floor.binding, floor.floor_s) == (BindingResource.HBM, pytest.approx(5e-3))


def test_causes_of_a_step_bound_by_hbm_are_the_seconds_in_which_it_rests() -> None:
    floor = step_floor(STEP, V5E)
    causes = {cause.cause: cause.seconds for cause in floor.causes}
    # The HBM is busy for 5.4 ms with bytes of 5 ms at its peak rate.
    expected = {
        "matmuls below peak": 0.5e-3,
        "exposed over tp": 0.4e-3,
        SLOW_HBM: 0.4e-3,
        "latency of small ops": 0.2e-3,
    }
    assert causes == pytest.approx(expected)
    assert sum(cause.seconds for cause in floor.causes) == pytest.approx(6.5e-3 - 5e-3)


def test_causes_of_a_step_bound_by_compute_are_the_seconds_without_flops() -> None:
    parts = tuple(replace(part, hbm_bytes=1.0) for part in STEP.parts)
    floor = step_floor(replace(STEP, parts=parts), V5E)
    assert (floor.binding, floor.floor_s) == (BindingResource.COMPUTE, pytest.approx(2e-3))
    causes = {cause.cause: cause.seconds for cause in floor.causes}
    expected = {
        "matmuls below peak": 1e-3,  # 4 ms less 2 ms of FLOPs and 1 ms of padding
        PADDING: 1e-3,
        "latency of small ops": 1e-3,
        "exposed over tp": 1e-3,
        "waiting for HBM": 0.5e-3,
    }
    assert causes == pytest.approx(expected)
    assert sum(cause.seconds for cause in floor.causes) == pytest.approx(6.5e-3 - 2e-3)


def test_a_step_without_activities_has_one_unknown_cause() -> None:
    floor = step_floor(replace(STEP, activities=()), V5E)
    assert [cause.cause for cause in floor.causes] == [OTHER]
    assert floor.causes[0].seconds == pytest.approx(1.5e-3)


def test_wire_bytes_that_overlap_work_shorten_its_causes() -> None:
    """7.2 ms of wire bytes, of which 1 ms is exposed: the rest runs during the other 5.5 ms of activities."""
    wire_bytes = 6 * 1.8e8
    parts = tuple(replace(part, hbm_bytes=1.0, flops=0.0) for part in STEP.parts)
    exposed = replace(STEP.activities[2], wire_bytes=wire_bytes)
    step = replace(
        STEP,
        parts=(replace(parts[0], wire_bytes=wire_bytes), parts[1]),
        activities=(*STEP.activities[:2], exposed, STEP.activities[3]),
    )
    floor = step_floor(step, V5E)
    assert (floor.binding, floor.floor_s) == (BindingResource.INTERCONNECT, pytest.approx(6e-3))
    causes = {cause.cause: cause.seconds for cause in floor.causes if cause.cause != OTHER}
    assert causes == pytest.approx(
        {"matmuls below peak": 4 / 5.5 * 0.5e-3, "latency of small ops": 1 / 5.5 * 0.5e-3}
    )
    assert sum(cause.seconds for cause in floor.causes) == pytest.approx(0.5e-3)


def test_a_step_below_its_floor_has_no_causes() -> None:
    short = estimate(4e-3)
    floor = step_floor(replace(STEP, step=short), V5E)
    assert floor.causes == ()


def test_rows_are_sorted_by_expert_in_a_mixture_alone() -> None:
    gather = ActivityTime(activity=Activity.GATHER, seconds=1e-3, hbm_busy_s=0.0)
    step = replace(STEP, activities=(*STEP.activities[1:], gather))
    expected = {False: "gathers of rows", True: SORTING}
    for has_experts, name in expected.items():
        part = "moe.experts" if has_experts else "mlp"
        floor = step_floor(replace(step, parts=(ATTN, replace(MLP, part=part))), V5E)
        assert name in {cause.cause for cause in floor.causes}


TOPOLOGIES = ("v4-8", "v5e-1", "v5e-8", "v5p-8", "v6e-1", "v6e-8", "2xv6e:4x4")
TOPOLOGIES += ("tpu7x:2x2x1", "h100:1", "h100:8", "a100:4", "2xh100:4")
MODELS = (
    *("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "codellama/CodeLlama-70b-hf"),
    *(
        "tiiuae/Falcon3-10B-Base",
        "Qwen/Qwen3-30B-A3B",
        "openai/gpt-oss-20b",
        "google/gemma-3-1b-it",
    ),
    *("deepseek-ai/DeepSeek-V3.1", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
)
DTYPES = ("bf16", "s8", "s4", "f8e4m3fn", "s8_w8a8")


def _random_experiment(random: Random) -> Experiment:
    """An experiment that the checks of specs accept, with a default chunk or none."""
    while True:
        topology = parse_topology(random.choice(TOPOLOGIES))
        sizes, left = {"pp": 1, random.choice(["dp", "fsdp"]): 1, "cp": 1}, topology.n_devices
        for axis in tuple(sizes):
            sizes[axis] = random.choice([n for n in range(1, left + 1) if left % n == 0])
            left //= sizes[axis]
        sizes |= {"tp": left, "ep": random.choice([1, 1, left, topology.n_devices])}
        plan = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        try:
            experiment = experiment_with(
                random.choice(MODELS),
                plan + random.choice(["", ",sp"]),
                topology,
                batch=random.choice([1, 4, 8, 64, 128, 1024]),
                prompt=random.choice([1, 7, 100, 128, 129, 512, 1000, 1024, 4096, 8192]),
                output=random.choice([2, 128, 512]),
                weight_dtype=random.choice(DTYPES),
                activation_dtype=random.choice(["bf16", "bf16", "f32"]),
            )
        except MeshscopeError:
            continue
        return random.choice([experiment, with_default_chunk(experiment)])


@pytest.mark.slow
def test_causes_of_predicted_steps_are_positive_and_add_up() -> None:
    """For random models, slices, plans, batches and dtypes; no step is shorter than its floor."""
    random = Random(5)
    bindings: set[BindingResource] = set()
    for _ in range(300):
        experiment = _random_experiment(random)
        chip, dtype = experiment.topology.chip, experiment.workload.weight_dtype
        for time in predicted_times(experiment):
            label = f"{experiment.model.name} {chip.name} {experiment.plan} {experiment.workload}"
            assert sum(a.seconds for a in time.activities) == pytest.approx(time.step.value_s), (
                label
            )
            assert all(0 <= a.hbm_busy_s <= a.seconds * (1 + ROUNDING) for a in time.activities), (
                label
            )
            assert sum(a.flops for a in time.activities) == pytest.approx(time.flops), label
            floor = step_floor(time, chip, dtype)
            bindings.add(floor.binding)
            beyond_s = time.step.value_s - floor.floor_s
            assert beyond_s >= -ROUNDING * time.step.value_s, label
            assert all(cause.seconds > 0 for cause in floor.causes), label
            caused_s = sum(cause.seconds for cause in floor.causes)
            assert caused_s == pytest.approx(beyond_s, abs=ROUNDING * time.step.value_s), label
            unknown_s = sum(c.seconds for c in floor.causes if c.cause == OTHER)
            assert unknown_s < 0.05 * time.step.value_s, label
    assert bindings == set(BindingResource)


def test_a_chip_without_published_peaks_has_no_floor() -> None:
    assert step_floor(STEP, chip_of("cpu")) is None
