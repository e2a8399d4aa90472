"""The closed form against the rows of the prediction, the declaration of weights, and itself one by one."""

from dataclasses import replace

import numpy as np
import pytest

from meshscope.cost.closed_form import closed_steps, plan_form, stacked
from meshscope.cost.efficiency import PEAKS
from meshscope.cost.features import (
    ACTS,
    CACHE,
    KERNEL,
    MATMUL,
    MOVED,
    PARTS,
    TILES,
    VECTOR,
    WEIGHTS,
    expert_load,
)
from meshscope.cost.predicted import predicted_times
from meshscope.errors import SpecError
from meshscope.events.enums import Part, Phase
from meshscope.interconnect import collective_time
from meshscope.prediction import predict
from meshscope.spec.experiment import Experiment, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.model.model import MlpKind
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.plan.weights import device_weight_bytes, expert_weights, outer_weights
from meshscope.spec.workload import Workload

LLAMA, QWEN, MOE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B"
MLA = "deepseek-ai/DeepSeek-V2-Lite"


def _experiment(
    model: str, topology: str, plan: str, sizes: tuple[int, int], layers: int | None = None
) -> Experiment:
    batch, prompt = sizes
    return experiment_of(
        model=read_model(model),
        plan=parse_plan(plan),
        topology=parse_topology(topology),
        workload=Workload(batch=batch, prompt=prompt, output=128),
        n_layers=layers,
    )


CASES = [
    _experiment(LLAMA, "v6e-8", "tp=8", (8, 1024), 3),
    _experiment(LLAMA, "v6e-8", "tp=8,sp", (16, 512), 3),
    _experiment(LLAMA, "v6e-8", "tp=8,sp", (3, 512), 3),
    _experiment(LLAMA, "v5e-8", "fsdp=2,tp=4", (8, 256), 3),
    _experiment(LLAMA, "v4-8", "fsdp=8", (8, 384), 3),
    _experiment(QWEN, "v6e-8", "cp=2,tp=4", (4, 1024), 3),
    _experiment(QWEN, "2xv6e:2x4", "dp=2,tp=8", (4, 1024), 3),
    _experiment(MOE, "v6e-8", "dp=2,tp=4,ep=8", (8, 256), 3),
    _experiment(MOE, "v6e-8", "dp=8,ep=8", (16, 128), 3),
    _experiment(MOE, "v5p-16", "tp=8,ep=8", (4, 256), 3),
    _experiment(MLA, "v6e-8", "dp=2,tp=4,ep=8", (8, 1024), 4),
]
IDS = [f"{e.model.name.rsplit('/', 1)[-1]} {e.topology.name} {e.plan}" for e in CASES]


def _closed(experiment: Experiment, phase: Phase):
    form = plan_form(experiment, phase)
    workload = experiment.workload
    sizes = {n: np.array([float(getattr(workload, n))]) for n in ("batch", "prompt", "output")}
    return form, closed_steps(stacked([form]), np.zeros(1, dtype=np.int64), **sizes)


@pytest.mark.parametrize("experiment", CASES, ids=IDS)
@pytest.mark.parametrize("phase", Phase)
def test_communication_is_that_of_the_predicted_rows(experiment: Experiment, phase: Phase):
    """Row by row through the model on one side, three small workloads and lines on the other."""
    total = sum(
        row.count
        * collective_time(
            row.kind,
            groups=row.groups,
            payload_bytes=row.payload_bytes,
            topology=experiment.topology,
        ).seconds
        for row in predict(experiment)
        if row.phase is phase
    )
    form, closed = _closed(experiment, phase)
    assert closed.lines_s.sum() == pytest.approx(total, rel=1e-6)
    payloads = sum(
        row.count * row.payload_bytes for row in predict(experiment) if row.phase is phase
    )
    told = sum(
        closed.payload_bytes[0, m] * (line.n_tick + line.n_once)
        for m, line in enumerate(form.lines)
    )
    assert told == pytest.approx(payloads, rel=1e-6)


@pytest.mark.parametrize("experiment", [e for e in CASES if e.plan.pp == 1 and e.plan.fsdp == 1])
def test_weights_are_read_once_a_step(experiment: Experiment):
    """All that a device holds but the embedding's table, of which a step looks up rows; untied heads only.

    Of experts, those that some token of the step chooses.
    """
    _, closed = _closed(experiment, Phase.DECODE)
    model, plan = experiment.model, experiment.plan
    held = device_weight_bytes(model, plan, "bf16")
    table, norm, *_ = outer_weights(model, plan)
    outside = table.local_bytes(plan, "bf16") + norm.local_bytes(plan, "bf16")
    norms = sum(2 * model.hidden for _ in model.layers)  # what stands before each MLP is no matrix
    read = closed.quantities[0, :, WEIGHTS].sum()
    load = expert_load(experiment, Phase.DECODE)
    if load is not None:
        assert model.moe is not None
        n_layers = sum(layer.mlp is not MlpKind.DENSE for layer in model.layers)
        experts = sum(w.local_bytes(plan, "bf16") for w in expert_weights(model)) * n_layers
        held -= experts * (1 - load.experts * plan.ep / model.moe.n_experts)
    assert held - outside - 2 * norms <= read <= held - outside


def test_flops_of_a_dense_prompt_are_two_a_weight_and_token_and_those_of_attention():
    """Scaling book, part 4: 2 x tokens x parameters, and for attention 4 T S N H, halved by the mask."""
    experiment = _experiment(LLAMA, "v6e:1x1", "tp=1", (1, 4096))
    _, closed = _closed(experiment, Phase.PREFILL)
    flops = closed.quantities[0, :, [MATMUL, KERNEL, VECTOR]].sum()
    in_layers = 6_979_321_856  # 8.03e9 parameters without embedding, head and norms
    causal = 4 * 32 * 32 * 128 * 4096 * (4096 + 512) / 2
    head = 2 * 128_256 * 4096
    assert flops == pytest.approx(2 * in_layers * 4096 + causal + head)


def test_many_plans_together_come_out_as_one_by_one():
    forms = [plan_form(e, phase) for e in CASES for phase in Phase]
    rng = np.random.default_rng(3)
    n = 200
    at = rng.integers(0, len(forms), n)
    batch = 16.0 * rng.integers(1, 9, n)
    prompt = 128.0 * rng.integers(1, 33, n)
    output = rng.integers(2, 400, n).astype(float)
    together = closed_steps(stacked(forms), at, batch=batch, prompt=prompt, output=output)
    for i in range(0, n, 7):
        alone = closed_steps(
            stacked([forms[at[i]]]),
            np.zeros(1, dtype=np.int64),
            batch=batch[[i]],
            prompt=prompt[[i]],
            output=output[[i]],
        )
        assert together.step_s[i] == pytest.approx(alone.step_s[0])
        assert together.exposed_s[i].sum() == pytest.approx(alone.exposed_s[0].sum())


@pytest.mark.parametrize("experiment", CASES, ids=IDS)
def test_parts_make_up_the_predicted_step(experiment: Experiment):
    for time in predicted_times(experiment):
        assert time.compute_s + time.exposed_s + time.idle_s == pytest.approx(time.step.value_s)
        assert sum(part.compute_s for part in time.parts) == pytest.approx(time.compute_s)
        assert sum(part.exposed_s for part in time.parts) == pytest.approx(time.exposed_s)
        assert time.step.lower_s < time.step.value_s < time.step.upper_s


def test_pipeline_waits_in_the_ticks_in_which_it_has_no_work():
    """M micro-batches and P stages: of M + P - 1 ticks a stage works in M (GPipe, section 2.3)."""
    whole = _experiment(QWEN, "v6e-8", "tp=8", (8, 1024), 8)
    piped = _experiment(QWEN, "v6e-16", "pp=2,tp=8", (8, 1024), 8)
    (alone, _), (prefill, decode) = predicted_times(whole), predicted_times(piped)
    assert piped.n_microbatches(Phase.PREFILL) == 2
    assert 0.25 * prefill.step.value_s < prefill.bubble_s < prefill.step.value_s / 3
    assert 0.4 * decode.step.value_s < decode.bubble_s < decode.step.value_s / 2
    assert prefill.step.value_s < alone.step.value_s


def test_time_at_published_peaks_is_the_longer_of_flops_and_bytes():
    """Scaling book, part 9: LLaMA-3-70B int8 on 16 v5e, every weight and key read: 8.5 ms a step."""
    experiment = experiment_of(
        model=read_model("meta-llama/Llama-3.3-70B"),
        plan=parse_plan("tp=16"),
        topology=parse_topology("v5e:4x4"),
        workload=Workload(batch=32, prompt=8191, output=1, weight_dtype="s8", cache_dtype="s8"),
    )
    form = plan_form(experiment, Phase.DECODE, efficiency=PEAKS)
    sizes = {"batch": [32.0], "prompt": [8191.0], "output": [1.0]}
    closed = closed_steps(
        stacked([form]),
        np.zeros(1, dtype=np.int64),
        **{name: np.array(value) for name, value in sizes.items()},
    )
    read = closed.quantities[0, :, [WEIGHTS, CACHE]].sum()
    # 16 devices share 8 key and value heads: what the book leaves out is that each is held twice.
    table = 128_256 * 8192 / 16
    assert read == pytest.approx((70.55e9 / 16 - table) + 2 * 41.9e9 / 16, rel=0.03)
    assert closed.quantities[0, :, ACTS].sum() < 0.05 * read


def test_chip_without_published_figures_has_no_predicted_time():
    experiment = _experiment(LLAMA, "cpu:8", "tp=8", (1, 128), 2)
    assert predicted_times(experiment) == ()
    with pytest.raises(SpecError, match=r"run on live devices|calibrate"):
        plan_form(experiment, Phase.PREFILL)


def test_parts_are_told_once():
    assert len(set(PARTS)) == len(PARTS)


def test_weights_gathered_ahead_on_v5e_hide_behind_the_layers_and_on_v6e_stop_them():
    hidden, shown = (
        predicted_times(_experiment(LLAMA, f"{chip}-8", "fsdp=8", (8, 2048), 8))[0]
        for chip in ("v5e", "v6e")
    )
    assert hidden.exposed_s < 0.7 * hidden.collective_s
    assert shown.exposed_s == pytest.approx(shown.collective_s)


def test_ring_of_cp_hides_behind_attention():
    prefill, decode = predicted_times(_experiment(QWEN, "v6e-8", "cp=2,tp=4", (4, 8192), 3))
    assert prefill.exposed_by_axis_s["cp"] < 0.1 * prefill.exposed_by_axis_s["tp"]
    assert decode.exposed_by_axis_s["cp"] > 0


def test_weights_of_few_heads_are_laid_out_and_the_cache_is_not():
    """Llama-3.1-8B: two heads of keys and values a device, and one with four of queries; decode reads
    its cache once, as the compiler lays it out."""
    slots, b = 512 + 128, 16
    two, one = (
        _closed(_experiment(LLAMA, f"v6e-{tp}", f"tp={tp}", (b, 512), 1), Phase.DECODE)[1]
        for tp in (4, 8)
    )
    keys_and_values, queries = 2 * 4096, 4096  # a tile for each row of the residual stream
    assert two.quantities[0, :, TILES].sum() == keys_and_values
    assert one.quantities[0, :, TILES].sum() == queries
    assert one.quantities[0, :, MOVED].sum() == 0
    assert one.quantities[0, :, CACHE].sum() == 2 * b * slots * 128 * 2


def test_experts_whose_rows_travel_pass_over_all_the_room_and_compute_what_is_expected():
    """Without a capacity factor 8 devices have room for all rows of all tokens; with factor 1 for an eighth."""
    experiment = _experiment(MOE, "v6e-8", "dp=8,ep=8", (8, 128), 3)
    narrow = replace(experiment, program=replace(experiment.program, capacity_factor=1.0))
    (_, wide_steps), (_, narrow_steps) = (_closed(e, Phase.PREFILL) for e in (experiment, narrow))
    experts = PARTS.index(Part.MOE_EXPERTS)
    wide, less = wide_steps.quantities[0, experts], narrow_steps.quantities[0, experts]
    assert wide[MATMUL] == less[MATMUL]
    assert wide[TILES] == pytest.approx(8 * less[TILES])
    assert wide_steps.step_s[0] > narrow_steps.step_s[0]
