"""The closed form against predicted rows, declared weights and published worked examples; DeepSeek-V4.1 on its smallest slices."""

from dataclasses import replace

import numpy as np
import pytest
from accuracy_steps import PEAKS
from made import closed, closed_of, experiment_with
from msgspec import structs
from tables import cases, table

from meshscope.analysis.utilization import model_flops
from meshscope.api.request import ExperimentRequest
from meshscope.cost.closed_form import cost_s, plan_form
from meshscope.cost.collectives import predict
from meshscope.cost.expert_load import expert_load, hit_spread, miss_frac, most_hit_frac
from meshscope.cost.features import IS_ONCE, PARTS, Cost
from meshscope.cost.memory import predicted_memory
from meshscope.cost.predicted import evaluated, predicted_times, timed_predictions
from meshscope.errors import SpecError
from meshscope.events.enums import REQUEST_PHASES, Kind, Part, Phase
from meshscope.events.step_time import StepTime
from meshscope.hardware.compiler_facts import OPERATIONS
from meshscope.hardware.interconnect.lines import collective_time
from meshscope.hardware.topology import parse_topology
from meshscope.model.layers import MlpKind
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine
from meshscope.plans.weights import device_weight_bytes, expert_weights, outer_weights

LLAMA, QWEN, MOE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B"
MLA, WINDOWED = "deepseek-ai/DeepSeek-V2-Lite", "google/gemma-3-1b-it"
LLAMA_70B = "meta-llama/Llama-3.1-70B"


def _experiment(
    model: str, topology: str, plan: str, sizes: tuple[int, int], layers: int | None = None
) -> Experiment:
    workload = {"batch": sizes[0], "prompt": sizes[1], "output": 128}
    return experiment_with(model, plan, topology, n_layers=layers, **workload)


CASES = cases(__file__, _experiment)
# Rings over windows have fewer steps; these tables are tied.
RINGS = [_experiment(WINDOWED, "v6e-4", "cp=4", (2, prompt), 12) for prompt in (512, 1024, 8192)]
IDS = [f"{e.model.name.rsplit('/', 1)[-1]} {e.topology.name} {e.plan}" for e in CASES]


@pytest.mark.parametrize(
    "experiment", [*CASES, *RINGS, *cases(__file__, _experiment, "compiler_choices")]
)
@pytest.mark.parametrize("phase", REQUEST_PHASES)
def test_communication_equals_that_of_the_predicted_rows(experiment: Experiment, phase: Phase):
    """Sum over the rows against payload coefficients from three reference workloads."""
    rows = timed_predictions(predict(experiment), experiment)
    rows = [row for row in rows if row.phase is phase]
    form, steps = closed_of(experiment, phase)
    total_s = sum(row.count * row.dur_s for row in rows)
    assert steps.collectives_s.sum() == pytest.approx(total_s, rel=1e-6)
    modeled = sum(
        steps.payload_bytes[0, m] * (collective.n_tick + collective.n_once)
        for m, collective in enumerate(form.collectives)
    )
    payloads = sum(row.count * row.payload_bytes for row in rows)
    assert modeled == pytest.approx(payloads, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "n_arrays"), [(LLAMA, 1), ("google/gemma-4-E2B", 6), ("zai-org/GLM-5.2", 2)]
)
def test_stages_send_the_bytes_of_the_predicted_rows(model: str, n_arrays: int):
    """Shared caches and embeddings are linear in tokens, the choice of an indexer is not."""
    experiment = _experiment(model, "v6e-16", "pp=2,tp=8", (8, 1024))
    rows = [r for r in predict(experiment) if r.part is Part.STAGE and r.phase is Phase.PREFILL]
    form, steps = closed_of(experiment, Phase.PREFILL)
    modeled = [
        steps.payload_bytes[0, m]
        for m, collective in enumerate(form.collectives)
        if collective.planned.part is Part.STAGE
    ]
    assert modeled == pytest.approx([row.payload_bytes for row in rows])
    assert len(rows) == n_arrays


@pytest.mark.parametrize("experiment", [e for e in CASES if e.plan.pp == 1 and e.plan.fsdp == 1])
def test_weights_are_read_once_per_step(experiment: Experiment):
    """All weights of a device except the embedding table, of which a step reads rows; untied heads only.

    Experts count if some token of the step chooses them.
    """
    _, steps = closed_of(experiment, Phase.DECODE)
    model, plan = experiment.model, experiment.plan
    held = device_weight_bytes(model, plan, "bf16")
    table, norm, *_ = outer_weights(model, plan)
    outside = table.local_bytes(plan, "bf16") + norm.local_bytes(plan, "bf16")
    norms = sum(2 * model.hidden for _ in model.layers)  # the norm before each MLP is not a matrix
    read = steps.costs[0, :, [Cost.WEIGHT_BYTES, Cost.CHOSEN_BYTES]].sum()
    load = expert_load(experiment, Phase.DECODE)
    if load is not None:
        n_layers = sum(layer.mlp is not MlpKind.DENSE for layer in model.layers)
        experts = sum(w.local_bytes(plan, "bf16") for w in expert_weights(model)) * n_layers
        held -= experts * (1 - load.experts * plan.ep / model.moe.n_experts)
    assert held - outside - 2 * norms <= read <= held - outside


def test_dense_prefill_flops_are_two_per_weight_and_token_plus_attention():
    """Scaling book, part 4: 2 x tokens x parameters, and for attention 4 T S N H, halved by the mask."""
    experiment = _experiment(LLAMA, "v6e:1x1", "tp=1", (1, 4096))
    _, steps = closed_of(experiment, Phase.PREFILL)
    flops = steps.costs[0, :, [Cost.MATMUL_FLOPS, Cost.PAGED_FLOPS]].sum()
    in_layers = 6_979_321_856  # 8.03e9 parameters without embedding, head and norms
    causal = 4 * 32 * 32 * 128 * 4096 * (4096 + 512) / 2
    head = 2 * 128_256 * 4096
    assert flops == pytest.approx(2 * in_layers * 4096 + causal + head)


def test_batched_evaluation_equals_single_evaluation():
    forms = [plan_form(e, phase) for e in CASES for phase in REQUEST_PHASES]
    rng = np.random.default_rng(3)
    at = rng.integers(0, len(forms), 200)
    sizes = {"batch": 16 * rng.integers(1, 9, 200), "prompt": 128 * rng.integers(1, 33, 200)}
    sizes["output"] = rng.integers(2, 400, 200)
    together = closed(forms, at, **sizes)
    for i in range(0, 200, 7):
        alone = closed([forms[at[i]]], **{name: values[[i]] for name, values in sizes.items()})
        assert together.step_s[i] == pytest.approx(alone.step_s[0])
        assert together.exposed_s[i].sum() == pytest.approx(alone.exposed_s[0].sum())


@pytest.mark.parametrize("experiment", CASES, ids=IDS)
def test_parts_sum_to_the_step(experiment: Experiment):
    for time in predicted_times(experiment):
        assert time.compute_s + time.exposed_s + time.idle_s == pytest.approx(time.step.value_s)
        assert sum(part.compute_s for part in time.parts) == pytest.approx(time.compute_s)
        assert sum(part.exposed_s for part in time.parts) == pytest.approx(time.exposed_s)
        assert time.step.lower_s < time.step.value_s < time.step.upper_s


def test_pipeline_bubble_is_that_of_gpipe():
    """With M micro-batches and P stages, a stage works in M of M + P - 1 ticks (GPipe, section 2.3)."""
    whole = _experiment(QWEN, "v6e-8", "tp=8", (8, 1024), 8)
    piped = _experiment(QWEN, "v6e-16", "pp=2,tp=8", (8, 1024), 8)
    (alone, _), (prefill, decode) = predicted_times(whole), predicted_times(piped)
    assert piped.n_microbatches(Phase.PREFILL) == 2
    assert 0.25 * prefill.step.value_s < prefill.bubble_s < prefill.step.value_s / 3
    assert 0.4 * decode.step.value_s < decode.bubble_s < decode.step.value_s / 2
    assert prefill.step.value_s < alone.step.value_s


def _vllm_decode_s(topology: str, plan: str) -> float:
    experiment = _experiment("meta-llama/Llama-3.2-3B", topology, plan, (1, 128))
    return predicted_times(replace(experiment, engine=Engine.VLLM))[1].step.value_s


@table
def test_a_single_sequence_takes_every_stage_and_every_boundary_once(topology: str, n_slow: int):
    """28 layers over 8 stages, of which four have 3: they take as long as on one device."""
    sends_s = 0.0
    for groups, n in ((((0, 1),), 7 - n_slow), (((3, 4),), n_slow)):
        slices = parse_topology("h100:8" if groups == ((0, 1),) else "2xh100:4")
        time = collective_time(Kind.SEND, groups=groups, payload_bytes=2 * 3072, topology=slices)
        sends_s += 2 * n * time.seconds  # hidden states and residual
    alone_s = _vllm_decode_s("h100:1", "tp=1")
    assert _vllm_decode_s(topology, "pp=8") == pytest.approx(alone_s + sends_s, rel=1e-9)


@pytest.mark.parametrize("n_microbatches", [1, 2, 4])
def test_each_microbatch_waits_for_the_slowest_boundary(n_microbatches: int):
    """A boundary between slices is crossed by every micro-batch, one after the other."""

    def prefill(topology: str):
        experiment = _experiment(QWEN, topology, "pp=4", (8, 512), 8)
        program = replace(experiment.program, microbatches=n_microbatches)
        experiment = replace(experiment, program=program)
        rows = timed_predictions(predict(experiment), experiment)
        rows = [row for row in rows if row.phase is Phase.PREFILL]
        sends_s = [row.dur_s for row in rows if row.part is Part.STAGE]
        shared_s = sum(row.dur_s for row in rows if row.part is Part.SAMPLE)
        return predicted_times(experiment)[0].step.value_s - shared_s, sends_s

    (one_slice_s, fast), (two_slices_s, slow) = prefill("v6e:2x2"), prefill("2xv6e:1x2")
    assert max(slow) > 2 * max(fast)
    fast_s, slow_s = (sum(s) + (n_microbatches - 1) * max(s) + s[-1] for s in (fast, slow))
    assert two_slices_s - one_slice_s == pytest.approx(slow_s - fast_s, rel=1e-6)


def test_stages_of_other_layers_count_with_their_own():
    """DeepSeek-V2-Lite has one dense layer, in the first stage."""
    experiment = _experiment(MLA, "v6e:1x2", "pp=2", (8, 512), 4)
    form = plan_form(experiment, Phase.PREFILL)
    whole = plan_form(_experiment(MLA, "v6e:1x1", "tp=1", (8, 512), 4), Phase.PREFILL)
    mlp = PARTS.index(Part.MLP)
    assert form.costs.all_stages == pytest.approx(whole.costs.coefficients)
    assert form.costs.all_stages[mlp].any()


def test_decode_at_published_peaks_reads_weights_and_cache():
    """Scaling book, part 9: LLaMA-3-70B int8 on 16 v5e, every weight and key read: 8.5 ms a step."""
    sizes = {"batch": 32, "prompt": 8191, "output": 1}
    dtypes = {"weight_dtype": "s8", "cache_dtype": "s8"}
    experiment = experiment_with(LLAMA_70B, "tp=16", "v5e:4x4", **sizes, **dtypes)
    _, steps = closed_of(experiment, Phase.DECODE, efficiency=PEAKS)
    read = steps.costs[0, :, [Cost.WEIGHT_BYTES, Cost.CACHE_BYTES]].sum()
    # 16 devices store each of 8 key and value heads twice, which the book leaves out.
    table = 128_256 * 8192 / 16
    assert read == pytest.approx((70.55e9 / 16 - table) + 2 * 41.9e9 / 16, rel=0.03)
    assert steps.costs[0, :, Cost.PASS_BYTES].sum() < 0.05 * read


def test_a_chip_or_fabric_without_published_figures_has_no_time_or_interval() -> None:
    """No published times of collectives on GPUs are known; a plan without collectives has an interval."""
    experiment = _experiment(LLAMA, "cpu:8", "tp=8", (1, 128), 2)
    assert predicted_times(experiment) == ()
    with pytest.raises(SpecError, match=r"run on live devices|calibrate"):
        plan_form(experiment, Phase.PREFILL)
    for plan, has_interval in (("tp=4", False), ("dp=4", True)):
        experiment = experiment_with("Qwen/Qwen3-4B", plan, "h100:4", batch=4, prompt=128, output=8)
        for time in predicted_times(experiment):
            assert (time.step.low_s is not None) is has_interval
            assert any(note.startswith("no interval") for note in time.notes) is not has_interval


@pytest.mark.parametrize(("chip", "is_hidden"), [("v5e", True), ("v6e", False)])
def test_fsdp_gathers_overlap_the_layers_on_v5e_and_stall_them_on_v6e(chip, *, is_hidden):
    """libtpu gathers weights ahead on v5e; rows that overlap compute have no exposed time."""
    experiment = _experiment(LLAMA, f"{chip}-8", "fsdp=8", (8, 2048), 8)
    step = predicted_times(experiment)[0]
    assert (step.exposed_s < 0.7 * step.collective_s) is is_hidden
    assert is_hidden or step.exposed_s == pytest.approx(step.collective_s)
    rows = timed_predictions(predict(experiment), experiment)
    gathers = [row for row in rows if row.phase is Phase.PREFILL and row.kind is Kind.ALL_GATHER]
    assert {row.exposed_s is None for row in gathers if row.layer is not None} == {is_hidden}
    assert {row.exposed_s is None for row in gathers if row.layer is None} == {False}


def test_cp_ring_overlaps_attention():
    prefill, decode = predicted_times(_experiment(QWEN, "v6e-8", "cp=2,tp=4", (4, 8192), 3))
    assert prefill.exposed_by_axis_s["cp"] < 0.1 * prefill.exposed_by_axis_s["tp"]
    assert decode.exposed_by_axis_s["cp"] > 0


def test_plain_decode_attention_reads_the_static_cache_and_a_kernel_the_filled_positions():
    experiment = _experiment(LLAMA, "v6e-8", "tp=8", (16, 512), 1)
    form = plan_form(experiment, Phase.DECODE)
    forms = [replace(form, reads_static_cache=static) for static in (True, False)]
    costs = closed(forms, (0, 1), batch=[16] * 2, prompt=[512] * 2, output=[128] * 2).costs
    per_position = 2 * 16 * 128 * 2  # keys and values of one head in bf16
    expected = [per_position * n for n in (512 + 128, experiment.workload.mean_context)]
    assert list(costs[:, :, Cost.CACHE_BYTES].sum(axis=1)) == expected


def test_exchanged_rows_are_contiguous_and_others_are_gathered_one_by_one():
    """Under balanced routing a device receives as many rows as it sends; without exchange it sorts all."""
    exchanged, shared = (
        closed_of(_experiment(MOE, "v6e-8", plan, (8, 128), 3), Phase.PREFILL)[1]
        for plan in ("dp=8,ep=8", "tp=8,ep=8")
    )
    sorted_s = [steps.costs[0, :, Cost.SORTED_S].sum() for steps in (exchanged, shared)]
    row_s = (5.0 + 0.3 * 2048 / 128) / 1.75e9  # from VMEM, by the compiler's profile
    assert sorted_s == pytest.approx([0.0, 3 * 8192 * row_s])
    n_rows, hidden, ffn = 128 * 8, 2048, 768
    buffers_rows = 5 * n_rows + 4 * 1.25 * n_rows  # passes over sent rows and received ones
    residual = 2 * 128 * hidden  # the norm before the experts, and the sum after them
    moved_bytes = 2 * (
        buffers_rows * hidden + 2 * n_rows * ffn + residual
    )  # and of the gated product
    at = PARTS.index(Part.MOE_EXPERTS)
    pass_bytes = exchanged.costs[0, at, Cost.PASS_BYTES] * OPERATIONS.vmem_over_hbm
    assert pass_bytes == pytest.approx(3 * moved_bytes)


def test_rows_gathered_from_hbm_take_longer_than_from_vmem():
    """4,096 tokens of 2,048 numbers fit in VMEM as bf16, 8,192 do not; what experts return never does."""
    short, long = (
        closed_of(_experiment(MOE, "v6e-8", "tp=8,ep=8", (8, prompt), 1), Phase.PREFILL)[1].costs
        for prompt in (512, 1024)
    )
    in_vmem, in_hbm = 5.0 + 0.3 * 16, 15.0 + 1.7 * 16
    sorted_s = [costs[0, :, Cost.SORTED_S].sum() for costs in (short, long)]
    assert sorted_s[1] / sorted_s[0] == pytest.approx(2 * in_hbm / in_vmem)
    returned_s = [costs[0, :, Cost.RETURNED_S].sum() for costs in (short, long)]
    assert returned_s[1] / returned_s[0] == pytest.approx(2)


def test_weights_arrive_behind_collectives_and_small_operations():
    """Decode with few sequences takes as long as its weights; with many, collectives show."""
    options = {"batch": 8, "prompt": 2048, "weight_dtype": "s8", "cache_dtype": "s8"}
    form = plan_form(experiment_with(LLAMA_70B, "tp=16", "v5e:4x4", **options), Phase.DECODE)
    scales = np.array([1, 1, 0.01, 1, 1, 1])[:, None]  # of the seconds per byte
    quick = [structs.replace(c, lines=c.lines * scales) for c in form.collectives]
    fast = replace(form, collectives=tuple(quick))
    sizes = {"batch": [2, 2, 128, 128], "prompt": [2048] * 4, "output": [2] * 4}
    few, few_fast, many, many_fast = closed([form, fast], (0, 1, 0, 1), **sizes).step_s
    assert few == pytest.approx(few_fast, rel=1e-2)
    assert many > 1.2 * many_fast


@table
def test_experts_of_4_bits_are_converted_where_that_takes_longer_than_their_bytes(
    weight_dtype, of_weight, is_bound
) -> None:
    experiment = experiment_with(
        MOE, "tp=8,ep=8", "v6e-8", batch=64, prompt=1024, output=128, weight_dtype=weight_dtype
    )
    form = plan_form(experiment, Phase.DECODE)
    steps, _ = evaluated(form, experiment.workload)
    read_s, more_s = (
        float(steps.costs[0, :, cost].sum() * cost_s(form)[cost])
        for cost in (Cost.CHOSEN_BYTES, Cost.CONVERTED_S)
    )
    hit_frac = most_hit_frac(np.array((1 - 8 / 128) ** 64), np.array(hit_spread(128, 8)))
    n_weights = 48 * 16 * 3 * 2048 * 768 * hit_frac
    converted_s = n_weights * of_weight / 1.75e9
    assert read_s + more_s == pytest.approx(max(read_s, converted_s), rel=1e-3)
    assert (more_s > 0) == is_bound

    (decode,) = [time for time in predicted_times(experiment) if time.phase is Phase.DECODE]
    assert any("converting 4-bit experts" in note for note in decode.notes) == is_bound


def test_a_chunked_prefill_reads_its_weights_once_per_chunk():
    experiment = _experiment(LLAMA, "v6e:1x1", "tp=1", (1, 4096), 2)
    sizes = {"batch": [1, 1], "prompt": [4096, 4096], "output": [1, 1], "chunk": [4096, 1024]}
    steps = closed([plan_form(experiment, Phase.PREFILL)], (0, 0), **sizes)
    whole, chunked = steps.costs[:, IS_ONCE == 0].sum(axis=1)
    assert chunked[Cost.WEIGHT_BYTES] == 4 * whole[Cost.WEIGHT_BYTES]
    assert chunked[Cost.MATMUL_FLOPS] == pytest.approx(whole[Cost.MATMUL_FLOPS])
    assert chunked[Cost.KERNEL_FLOPS] == pytest.approx(whole[Cost.KERNEL_FLOPS])
    assert steps.step_s[1] > steps.step_s[0]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [512, 1024, 4096, 8192])
def test_windowed_kernels_compute_the_blocks_of_their_window(prompt: int):
    """gpt-oss: every other layer attends to 128 positions, in blocks of 512 x 512."""
    experiment = _experiment("openai/gpt-oss-120b", "v6e-8", "tp=8", (8, prompt), 2)
    _, steps = closed_of(experiment, Phase.PREFILL)
    attention = experiment.model.attention
    at = np.arange(prompt)
    distance = at[:, None] - at[None, :]
    n_pairs = 0
    for window in (attention.window, None):
        seen = (distance >= 0) & (distance < (window or prompt))
        blocks = seen.reshape(prompt // 512, 512, prompt // 512, 512).any(axis=(1, 3))
        n_pairs += blocks.sum() * 512 * 512
    flops = 4 * attention.n_heads // 8 * attention.head_dim * n_pairs * 8
    assert steps.costs[0, PARTS.index(Part.ATTN), Cost.PAGED_FLOPS] == flops


@pytest.mark.parametrize("experiment", CASES[:2], ids=IDS[:2])
def test_chunks_of_whole_sequences_cost_as_many_smaller_batches(experiment: Experiment) -> None:
    n_local = experiment.workload.batch // experiment.plan.data_size
    chunk = n_local // 4 * experiment.workload.prompt
    chunked = replace(experiment, workload=replace(experiment.workload, prefill_chunk=chunk))
    batch = experiment.workload.batch // 4
    quarter = replace(experiment, workload=replace(experiment.workload, batch=batch))

    prefill, decode = predicted_times(chunked)
    part, _ = predicted_times(quarter)

    assert prefill.step.value_s == pytest.approx(4 * part.step.value_s, rel=1e-12)
    assert prefill.exposed_s == pytest.approx(4 * part.exposed_s, rel=1e-12)
    wire_bytes = [4 * (cost.wire_bytes or 0) for cost in part.parts]
    assert [cost.wire_bytes for cost in prefill.parts] == pytest.approx(wire_bytes)
    assert decode == predicted_times(experiment)[1]


@table
def test_prefill_notes_that_it_lacks_the_choice_of_an_indexer(model, prompt, *, has_note) -> None:
    experiment = experiment_with(
        model, "tp=8,ep=8", "v6e-8", batch=1, prompt=prompt, output=128, n_layers=4
    )
    noted = {
        time.phase: "indexer's scores" in str(time.notes) for time in predicted_times(experiment)
    }
    assert noted == {Phase.PREFILL: has_note, Phase.DECODE: False}


@pytest.mark.parametrize("n_layers", [4, 5])
def test_the_figures_of_a_pipeline_are_means_over_its_stages(n_layers: int) -> None:
    """All devices together do the work of the same model without a pipeline, in stages of any size."""
    times = [
        predicted_times(_experiment(QWEN, topology, plan, (8, 512), n_layers))
        for topology, plan in (("v6e-4", "tp=4"), ("v6e-8", "pp=2,tp=4"))
    ]
    for single, staged in zip(*times, strict=True):
        assert 2 * staged.flops == pytest.approx(single.flops)
        activities = sum(spent.seconds for spent in staged.activities)
        assert activities == pytest.approx(staged.step.value_s)
        assert staged.compute_s + staged.exposed_s + staged.idle_s == pytest.approx(activities)


N_DEVICES = 64


def experiment(prompt: int, batch: int = N_DEVICES) -> Experiment:
    return ExperimentRequest(
        model="deepseek-ai/DeepSeek-V4.1-Flash",
        topology="v6e-64",
        plan="dp=64,ep=64",
        batch=batch,
        prompt=prompt,
    ).experiment()


@table
def test_the_smallest_slices_that_hold_it(topology: str, plan: str, *, fits: bool) -> None:
    """510 GB without drafts and images, 203 GB of them tables, which hosts may hold."""
    request = ExperimentRequest(
        model="deepseek-ai/DeepSeek-V4.1-Flash", topology=topology, plan=plan, batch=8, prompt=1024
    )
    assert predicted_memory(request.experiment()).fits is fits


def times(prompt: int) -> dict[Phase, StepTime]:
    return {time.phase: time for time in predicted_times(experiment(prompt))}


@pytest.mark.parametrize("prompt", [1024, 8192])
def test_flops_of_prefill_are_those_of_half_the_layers_and_of_the_last_tokens(prompt: int) -> None:
    """Within what the busiest device has more of experts, and the pairs that a causal mask leaves out."""
    flops = sum(part.flops for part in times(prompt)[Phase.PREFILL].parts) * N_DEVICES
    of_model = model_flops(experiment(prompt).model, experiment(prompt).workload, Phase.PREFILL)
    assert flops == pytest.approx(of_model, rel=0.15)


def test_steps_have_the_passes_that_choose_entries() -> None:
    """Keys of 68 bytes for each entry, 2.5 of a token in four layers; the candidates of four others do not grow."""
    short, long = (
        next(p for p in times(n)[Phase.DECODE].parts if p.part == "attn").hbm_bytes
        for n in (1 << 16, 1 << 17)
    )
    keys, scores = (
        2.5 * 68 * (1 << 16),
        2.5 * 4 * 4 * (1 << 16),
    )  # four passes, which may be in VMEM
    assert keys < long - short <= keys + scores
    assert not any("lacks the passes" in note for t in times(8192).values() for note in t.notes)


@pytest.mark.parametrize("n_tokens", [4, 128])
def test_unequally_popular_experts_are_missed_as_often_as_drawn_ones(n_tokens: int) -> None:
    drawn = np.random.default_rng(0).exponential(1.0, 100_000)
    expected = np.exp(-n_tokens * 10 / 512 * drawn).mean()
    missed = float(miss_frac(np.exp(-10 / 512), n_tokens, 1.0))
    assert missed == pytest.approx(expected, rel=0.01)
    assert missed > float(miss_frac(np.exp(-10 / 512), n_tokens, 0.0))
