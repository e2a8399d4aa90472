"""Roofline bounds, the floor of a step and the causes beyond it, from figures that are easy to divide."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from made import estimate, experiment_with, part_cost, step_time
from tables import table

from meshscope.analysis.roofline import (
    OTHER,
    PADDING,
    ROUNDING,
    SLOW_HBM,
    BindingResource,
    device_peaks,
    reasons_in,
    roofline_bounds,
    step_floor,
    why_sentence,
)
from meshscope.cost.predicted import predicted_times, with_default_chunk
from meshscope.errors import MeshscopeError
from meshscope.events.enums import Phase
from meshscope.events.step_time import Activity, ActivityTime, PartCost, StepTime
from meshscope.hardware.chips import chip_of
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment import Experiment

V5E = chip_of("v5e")  # 819 GB/s, 197 TFLOP/s, four links of 45 GB/s
ATTN = part_cost("attn", 0.5, collective_s=0.1, exposed_s=0.1, flops=1.97e13, hbm_bytes=1.638e11)
MLP = part_cost(
    "mlp", 1.0, collective_s=0.7, exposed_s=0.2, flops=1.576e14, hbm_bytes=8.19e10, wire_bytes=9e10
)
STEP = step_time(
    Phase.PREFILL,
    estimate(2.0, 1.0, 3.0),
    1.5,
    exposed_s=0.3,
    idle_s=0.2,
    collective_s=0.6,
    exposed_by_axis_s={"tp": 0.3},
    parts=(MLP, ATTN),
)


def test_peaks_are_those_of_one_device() -> None:
    peaks = device_peaks(chip_of("tpu7x"))
    assert peaks is not None
    assert (peaks.flops_per_s, peaks.hbm_bytes_per_s) == (2.307e15 / 2, 7.38e12 / 2)
    assert device_peaks(chip_of("cpu")) is None


def test_the_largest_bound_binds_and_the_factor_is_its_lead() -> None:
    whole, mlp, attn = roofline_bounds(STEP, V5E)
    assert (mlp.part, mlp.binding) == ("mlp", BindingResource.COMPUTE)
    assert (mlp.compute_s, mlp.hbm_s, mlp.interconnect_s) == pytest.approx((0.8, 0.1, 0.5))
    assert (mlp.factor, mlp.taken_s) == pytest.approx((1.6, 1.2))
    assert (attn.binding, attn.hbm_s, attn.factor) == (
        BindingResource.HBM,
        pytest.approx(0.2),
        pytest.approx(2),
    )
    assert (whole.compute_s, whole.hbm_s, whole.interconnect_s) == pytest.approx((0.9, 0.3, 0.5))
    assert (whole.binding, whole.roof_frac) == (BindingResource.COMPUTE, pytest.approx(0.45))


def test_a_part_whose_work_overlaps_others_has_no_share_of_its_own_time() -> None:
    """Weights that arrive during other parts need longer than the part takes."""
    short = replace(MLP, compute_s=0.1, exposed_s=0.0)
    whole, *parts = roofline_bounds(replace(STEP, parts=(short, ATTN)), V5E)
    shares = {bound.part: bound.roof_frac for bound in parts}
    assert shares["mlp"] is None
    assert shares["attn"] is not None
    assert whole.roof_frac is not None


def test_the_bound_of_a_step_is_its_floor() -> None:
    """Seconds of collectives, which no peak gives, are in neither."""
    slow = replace(STEP, parts=(replace(MLP, collective_s=50.0), ATTN))
    whole, floor = roofline_bounds(slow, V5E)[0], step_floor(slow, V5E)
    bounds = (whole.binding, whole.compute_s, whole.hbm_s, whole.interconnect_s)
    assert bounds == (floor.binding, floor.compute_s, floor.hbm_s, floor.link_s)


def test_each_chip_has_its_own_peaks_and_links_or_no_bound() -> None:
    """A GPU sends at the rate of all its links, and two devices share the peaks of a tpu7x."""
    whole = roofline_bounds(STEP, chip_of("h100"))[0]
    assert whole.interconnect_s == pytest.approx(9e10 / 4.5e11)
    whole = roofline_bounds(STEP, chip_of("tpu7x"))[0]
    assert whole.compute_s == pytest.approx((1.97e13 + 1.576e14) / 1.1535e15)
    assert roofline_bounds(STEP, chip_of("cpu")) == []


LATENCY = "latency of small ops"
WORK = {"flops": 1.97e11, "hbm_bytes": 8.19e8, "wire_bytes": 1.8e8}
DECODE_ATTN = part_cost("attn", 3e-3, collective_s=1e-3, exposed_s=1e-3, **WORK)
DECODE_MLP = part_cost("mlp", 2e-3, flops=1.97e11, hbm_bytes=4 * 8.19e8, wire_bytes=0.0)


def _spent(activity: Activity, seconds: float, hbm_busy_s: float, **facts: Any) -> ActivityTime:
    return ActivityTime(activity=activity, seconds=seconds, hbm_busy_s=hbm_busy_s, **facts)


DECODE = step_time(
    Phase.DECODE,
    estimate(6.5e-3),
    5e-3,
    exposed_s=1e-3,
    idle_s=0.5e-3,
    collective_s=1e-3,
    exposed_by_axis_s={"tp": 1e-3},
    parts=(DECODE_ATTN, DECODE_MLP),
    activities=(
        _spent(Activity.MATMUL, 4e-3, 3.5e-3, flops=3.94e11, padding_flops=1.97e11),
        _spent(Activity.SMALL, 1e-3, 0.8e-3),
        _spent(Activity.EXPOSED, 1e-3, 0.6e-3, axis="tp", wire_bytes=1.8e8),
        _spent(Activity.COPY, 0.5e-3, 0.5e-3),
    ),
)
# The rest of 6 ms of wire bytes runs during the other 5.5 ms of activities.
WIRE_BOUND = replace(
    DECODE,
    parts=(
        replace(DECODE_ATTN, hbm_bytes=1.0, flops=0.0, wire_bytes=6 * 1.8e8),
        replace(DECODE_MLP, hbm_bytes=1.0, flops=0.0),
    ),
    activities=(
        *DECODE.activities[:2],
        replace(DECODE.activities[2], wire_bytes=6 * 1.8e8),
        DECODE.activities[3],
    ),
)
COMPUTE_BOUND = replace(DECODE, parts=tuple(replace(part, hbm_bytes=1.0) for part in DECODE.parts))


def test_bounds_are_work_over_peak_rates() -> None:
    floor = step_floor(DECODE, V5E)
    assert (floor.hbm_s, floor.compute_s, floor.link_s) == pytest.approx((5e-3, 2e-3, 1e-3))


@pytest.mark.parametrize(
    ("step", "binding", "floor_s", "causes"),
    [
        # The HBM is busy for 5.4 ms with bytes of 5 ms at its peak rate: causes are the seconds of rest.
        (
            DECODE,
            BindingResource.HBM,
            5e-3,
            {"matmuls below peak": 0.5, "exposed over tp": 0.4, SLOW_HBM: 0.4, LATENCY: 0.2},
        ),
        # Causes are the seconds without FLOPs: 4 ms less 2 ms of FLOPs and 1 ms of padding.
        (
            COMPUTE_BOUND,
            BindingResource.COMPUTE,
            2e-3,
            {"matmuls below peak": 1, PADDING: 1, LATENCY: 1, "exposed over tp": 1, "waiting for HBM": 0.5},
        ),
        (
            WIRE_BOUND,
            BindingResource.INTERCONNECT,
            6e-3,
            {"matmuls below peak": 4 / 5.5 * 0.5, LATENCY: 1 / 5.5 * 0.5, OTHER: 0.5 / 5.5 * 0.5},
        ),
        (replace(DECODE, activities=()), BindingResource.HBM, 5e-3, {OTHER: 1.5}),
        (replace(DECODE, step=estimate(4e-3)), BindingResource.HBM, 5e-3, {}),
    ],
    ids=["hbm", "compute", "interconnect", "no activities", "below its floor"],
)  # fmt: skip
def test_causes_add_up_to_what_is_beyond_the_floor(step, binding, floor_s, causes) -> None:
    floor = step_floor(step, V5E)
    assert (floor.binding, floor.floor_s) == (binding, pytest.approx(floor_s))
    cause_ms = {cause.cause: cause.seconds * 1e3 for cause in floor.causes}
    assert cause_ms == pytest.approx(causes)
    beyond_s = max(0.0, step.step.value_s - floor_s)
    assert sum(cause_ms.values()) / 1e3 == pytest.approx(beyond_s)


TOPOLOGIES = (
    *("v4-8", "v5e-1", "v5e-8", "v5p-8", "v6e-1", "v6e-8", "2xv6e:4x4"),
    *("tpu7x:2x2x1", "h100:1", "h100:8", "a100:4", "2xh100:4"),
)
MODELS = (
    *("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "codellama/CodeLlama-70b-hf"),
    *("tiiuae/Falcon3-10B-Base", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"),
    *("google/gemma-3-1b-it", "deepseek-ai/DeepSeek-V3.1", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
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
            spent = time.activities
            assert sum(a.seconds for a in spent) == pytest.approx(time.step.value_s), label
            assert all(0 <= a.hbm_busy_s <= a.seconds * (1 + ROUNDING) for a in spent), label
            assert sum(a.flops for a in spent) == pytest.approx(time.flops), label
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


def test_a_chip_without_published_peaks_has_no_floor_and_its_sentence_the_time_alone() -> None:
    assert step_floor(DECODE, chip_of("cpu")) is None
    assert why_sentence(_reading(), chip_of("cpu")) == "decode takes 11 ms"


READING = part_cost("mlp", 11e-3, flops=1.97e11, hbm_bytes=8.19e9)
READS = ActivityTime(activity=Activity.KERNEL, seconds=11e-3, hbm_busy_s=10e-3, flops=1.97e11)


def _reading(*, exposed_s: float = 0.0, relayout_s: float = 0.0, idle_s: float = 0.0) -> StepTime:
    return step_time(
        Phase.DECODE,
        estimate(11e-3 + exposed_s + relayout_s + idle_s),
        11e-3 + relayout_s,
        exposed_s=exposed_s,
        idle_s=idle_s,
        collective_s=exposed_s,
        exposed_by_axis_s={"tp": exposed_s},
        parts=(READING,),
        activities=(
            READS,
            ActivityTime(activity=Activity.EXPOSED, seconds=exposed_s, hbm_busy_s=0.0, axis="tp"),
            ActivityTime(activity=Activity.RELAYOUT, seconds=relayout_s, hbm_busy_s=0.0),
            ActivityTime(activity=Activity.COPY, seconds=idle_s, hbm_busy_s=0.0),
        ),
    )


@table
def test_a_sentence_names_what_binds_and_the_largest_causes(options, sentence) -> None:
    assert why_sentence(_reading(**options), V5E) == f"decode {sentence}"


def test_every_reason_is_explained_once() -> None:
    """What the device does, then what changes it, whatever the sentence names."""
    spent = [
        ActivityTime(activity=activity, seconds=1e-3, hbm_busy_s=0.0, padding_flops=1.0)
        for activity in Activity
    ]
    for part in ("mlp", "moe.experts"):
        for work in ({"hbm_bytes": 1e9}, {"hbm_bytes": 1.0, "flops": 1.97e11}):
            parts = (PartCost(part=part, compute_s=1.0, collective_s=0.0, exposed_s=0.0, **work),)
            time = replace(_reading(), parts=parts, activities=tuple(spent))
            floor = step_floor(time, V5E)
            named = {cause.cause for cause in floor.causes} - {OTHER}
            sentences = [why_sentence(time, V5E, max_causes=len(named))]
            explained = list(reasons_in(sentences))
            assert {one.partition(": it ")[0] for one in explained} == named
            assert all("; less" in one or "no plan changes" in one for one in explained)
    said = list(reasons_in(["decode takes 2 s: 1 s exposed dp+tp communication, 1 s other"]))
    assert [one.partition(":")[0] for one in said] == ["exposed dp+tp communication"]
