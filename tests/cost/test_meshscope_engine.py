"""Predicted collectives of meshscope's own programs and of vLLM: row by row, as invariant sums, by stage and by chunk."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from made import experiment_with
from tables import read_rows, table

import meshscope
from meshscope.analysis.join import Verdict, compare
from meshscope.analysis.totals import step_totals
from meshscope.cost.collectives import predict
from meshscope.errors import PlanError
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Kind, Part, Phase
from meshscope.model.model import Model
from meshscope.plans.caches import ContextForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.program import Engine, Program
from meshscope.plans.weights import layer_weights, outer_weights

Make = Callable[..., Experiment]
AR, AG, RS = Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER
CP = Kind.PERMUTE
EMBED, ATTN, MLP, LM_HEAD = Part.EMBED, Part.ATTN, Part.MLP, Part.LM_HEAD

PLANS = ["tp=1", "tp=8", "tp=8,sp", "dp=8", "dp=2,tp=4", "fsdp=8", "fsdp=2,tp=4", "fsdp=2,tp=4,sp"]


KINDS = {"AR": AR, "AG": AG, "RS": RS, "CP": CP}


def _rows(rows: list[Collective], phase: Phase, *, layer: int | None) -> list[tuple[Any, ...]]:
    """Part, kind, axis and shape of each row of a layer."""
    chosen = (r for r in rows if r.phase is phase and r.layer == layer)
    return [(r.part, r.kind, r.axis, r.shape) for r in chosen]


def _read(text: str | None) -> list[tuple[Any, ...]]:
    """Rows such as 'attn CP cp 8,4,1,8 / mlp AR tp 8,4,64'."""
    words = (row.split() for row in text.split(" / ")) if text else ()
    return [
        (Part(part), KINDS[kind], axis, tuple(map(int, shape.split(","))))
        for part, kind, axis, shape in words
    ]


@pytest.mark.parametrize(
    "case",
    read_rows(Path(__file__).parent / "predicted_rows.csv", str, Phase, str, str),
    ids=lambda case: f"{case[0]} {case[1]}",
)
def test_predicted_collectives_match_the_program(make, small, case) -> None:
    plan, phase, outside, layer = case
    rows = predict(make(small, plan, batch=8, prompt=12, output=3))
    assert _rows(rows, phase, layer=None) == _read(outside)
    assert [_rows(rows, phase, layer=i) for i in (0, 1)] == [_read(layer)] * 2
    assert {r.layer for r in rows} <= {None, 0, 1}


def test_all_fields_of_a_predicted_row(make: Make, small: Model) -> None:
    *_, logits = predict(make(small, "dp=2,tp=4", batch=8, prompt=12, output=3))
    assert logits.shape == (4, 104)
    assert logits.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (logits.group_size, logits.count, logits.n_steps, logits.dtype) == (4, 1, 2, "bf16")
    assert (logits.payload_bytes, logits.wire_bytes) == (4 * 104 * 2, 4 * 104 * 2 * 3 // 4)
    assert (logits.stage, logits.crosses_slices, logits.inserted_by) == (None, None, "program")


def test_the_ring_sends_to_the_next_device_of_cp_in_every_turn_but_the_last(make, small) -> None:
    k = next(r for r in predict(make(small, "cp=3,tp=4", prompt=12)) if r.kind is CP)
    assert k.groups[:3] == ((0, 4), (4, 8), (8, 0))
    assert (k.n_groups, k.group_size, k.count) == (12, 2, 2)
    assert k.wire_bytes == k.payload_bytes == 4 * 8 * 2


V41_STEP = {"model": "deepseek-ai/DeepSeek-V4.1-Flash", "topology": "v6e-8", "output": 3}


def _by_layer(rows: list[Collective], phase: Phase) -> Counter[tuple[Any, ...]]:
    """How many layers have each row."""
    of_phase = (row for row in rows if row.phase is phase)
    return Counter((r.part.value, r.kind, r.axis, r.shape, r.dtype, r.count) for r in of_phase)


def test_only_the_last_chunk_of_deepseek_v4_1_has_its_second_half() -> None:
    """Of four chunks; under sp, entries of all tokens need a gather, and the streams of the last ones reach all devices."""
    step = V41_STEP | {"prompt": 1024, "prefill_chunk": 256}
    rows = _by_layer(predict(experiment_with(plan="tp=8,sp", batch=2, **step)), Phase.PREFILL)
    assert rows["attn", RS, "tp", (1, 256, 5120), "bf16", 8] == 20
    assert rows["attn", RS, "tp", (1, 128, 5120), "bf16", 2] == 20
    assert rows["attn", AG, "tp", (1, 256, 5120), "bf16", 8] == 21
    assert rows["attn", RS, "tp", (1, 128, 4 * 5120), "bf16", 2] == 1
    assert rows["attn", RS, "tp", (1, 128, 4), "f32", 2] == 1
    assert rows["lm_head", AG, "tp", (1, 129_280), "bf16", 2] == 1


def test_stages_of_deepseek_v4_1_send_streams_and_their_weights() -> None:
    """And all devices look up the rows of tables, before the first of two ticks of a decode step."""
    rows = predict(experiment_with(plan="pp=2,tp=4", batch=2, prompt=1024, **V41_STEP))
    by_layer = _by_layer(rows, Phase.DECODE)
    assert by_layer["stage", Kind.PERMUTE, "pp", (2, 1, 4, 5120), "bf16", 2] == 1
    assert by_layer["stage", Kind.PERMUTE, "pp", (2, 1, 4), "f32", 2] == 1
    assert by_layer["embed", AR, "pp", (2, 1, 6144), "bf16", 2] == 1
    assert {r.stage for r in rows if r.shape == (2, 1, 6144)} == {None}


def test_half_of_the_layers_of_deepseek_v4_1_prefill_the_last_128_tokens() -> None:
    """Two sums of a row [b,s,5120] a layer as DeepSeek's reference has them, and the rows of two tables over tp."""
    rows = predict(experiment_with(plan="tp=8", batch=2, prompt=1024, **V41_STEP))
    assert _by_layer(rows, Phase.PREFILL) == {
        ("embed", AR, "tp", (2, 1024, 5120), "bf16", 1): 1,
        ("embed", AR, "tp", (2, 1024, 6144), "bf16", 2): 1,
        ("attn", AR, "tp", (2, 1024, 5120), "bf16", 1): 20,
        ("moe.combine", AR, "tp", (2, 1024, 5120), "bf16", 1): 20,
        ("attn", AR, "tp", (2, 128, 5120), "bf16", 1): 20,
        ("moe.combine", AR, "tp", (2, 128, 5120), "bf16", 1): 20,
        ("lm_head", AG, "tp", (2, 129_280), "bf16", 1): 1,
    }
    of_half = {r.layer for r in rows if r.phase is Phase.PREFILL and r.shape == (2, 128, 5120)}
    assert of_half == {*range(20, 40)}
    assert _by_layer(rows, Phase.DECODE) == {
        ("embed", AR, "tp", (2, 1, 5120), "bf16", 1): 1,
        ("embed", AR, "tp", (2, 1, 6144), "bf16", 2): 1,
        ("attn", AR, "tp", (2, 1, 5120), "bf16", 1): 40,
        ("moe.combine", AR, "tp", (2, 1, 5120), "bf16", 1): 40,
        ("lm_head", AG, "tp", (2, 129_280), "bf16", 1): 1,
    }


def test_a_prompt_within_the_window_of_deepseek_v4_1_is_replayed_whole() -> None:
    """Ten layers have one of the two tables before them."""
    rows = predict(experiment_with(plan="tp=8", batch=2, prompt=96, **V41_STEP))
    sums = [r.shape for r in rows if r.phase is Phase.PREFILL and r.part is ATTN]
    assert sums == [(2, 96, 5120)] * 40
    first = predict(experiment_with(plan="tp=8", batch=2, prompt=256, n_layers=10, **V41_STEP))
    assert _by_layer(first, Phase.DECODE)["embed", AR, "tp", (2, 1, 6144), "bf16", 1] == 1


def test_tables_of_deepseek_v4_1_are_summed_over_the_axes_that_split_their_rows() -> None:
    """Two sequences on each data-parallel rank; rows of 24 x 256 numbers."""
    hashes, summed = (8, 1, 2, 24), (8, 1, 6144)
    over_dp = {("dp", AG, hashes), ("dp", RS, summed)}
    over_tp = {("tp", AR, (4, 1, 6144))}
    expected = {"all": over_dp | over_tp, "dp": over_dp, "tp": over_tp, "host": set()}
    for tables, rows in expected.items():
        plan = f"dp=2,tp=4,tables={tables}"
        predicted = predict(experiment_with(plan=plan, batch=8, prompt=1024, **V41_STEP))
        of_embed = (r for r in predicted if r.phase is Phase.DECODE and r.part is Part.EMBED)
        sums = {(r.axis, r.kind, r.shape) for r in of_embed if r.shape != (4, 1, 5120)}
        assert sums == rows, tables


def test_blocks_of_a_prompt_of_deepseek_v4_1_share_entries_as_they_are_stored() -> None:
    """Of 1024 tokens: windows of 20 layers, entries and keys of 3 with half as many, and of the first decoder layer.

    The last 128 tokens reach all devices of cp, which decode alike.
    """
    rows = predict(experiment_with(plan="cp=8", batch=2, prompt=1024, **V41_STEP))
    prefill, decode = (_by_layer(rows, phase) for phase in REQUEST_PHASES)
    gathered = {key[3:5]: n for key, n in prefill.items() if key[:3] == ("attn", AG, "cp")}
    assert gathered == {
        ((2, 1024, 1, 512), "f8e4m3fn"): 20,
        ((2, 1024, 1, 16), "u8"): 20,
        ((2, 512, 1, 256), "u8"): 3,
        ((2, 512, 1, 32), "f8e4m3fn"): 3,
        ((2, 512, 1, 64), "u8"): 3,
        ((2, 512, 1, 4), "u8"): 3,
        ((2, 1024, 1, 256), "u8"): 1,
        ((2, 1024, 1, 32), "f8e4m3fn"): 1,
        ((2, 1024, 1, 64), "u8"): 1,
        ((2, 1024, 1, 4), "u8"): 1,
    }
    assert prefill["attn", AR, "cp", (2, 128, 4, 5120), "bf16", 1] == 1
    assert prefill["attn", AR, "cp", (2, 128, 4), "f32", 1] == 1
    assert decode == {("embed", AR, "cp", (2, 1, 6144), "bf16", 2): 1}


def test_data_parallel_devices_share_the_tables_and_experts_of_deepseek_v4_1() -> None:
    """Hashes of all 8 sequences reach each device, whose rows are summed over dp, then tp; experts have 6 rows a token."""
    step = V41_STEP | {"prefill_chunk": 1024}  # a sequence at a time
    rows = predict(experiment_with(plan="dp=2,tp=4,ep=8", batch=8, prompt=1024, **step))
    prefill, decode = (_by_layer(rows, phase) for phase in REQUEST_PHASES)
    assert prefill["embed", AG, "dp", (2, 1024, 2, 24), "s32", 4] == 1
    scatter = Kind.REDUCE_SCATTER
    assert prefill["embed", scatter, "dp", (2, 1024, 6144), "bf16", 8] == 1
    assert prefill["embed", AR, "tp", (1, 1024, 6144), "bf16", 8] == 1
    assert decode["embed", AG, "dp", (8, 1, 2, 24), "s32", 1] == 1
    assert decode["embed", scatter, "dp", (8, 1, 6144), "bf16", 2] == 1
    assert decode["embed", AR, "tp", (4, 1, 6144), "bf16", 2] == 1
    for n_tokens, n_layers in (
        (1024 // 4, 20),
        (128 // 4, 20),
    ):  # tp splits the tokens of an exchange
        exchange = (Kind.ALL_TO_ALL, "dp+tp", (6 * n_tokens, 5120), "bf16", 4)
        assert prefill["moe.dispatch", *exchange] == prefill["moe.combine", *exchange] == n_layers
    assert decode["moe.dispatch", Kind.ALL_TO_ALL, "dp+tp", (6, 5120), "bf16", 1] == 40


@pytest.mark.parametrize(
    ("model", "n_held"),
    [
        ("Llama-3.1-8B", 32 * 2 * 4 * 128),  # L32, keys and values, K4 over tp=2, H128
        ("DeepSeek-V2-Lite", 27 * (512 + 64)),  # L27, R512 P64 on every device of tp
    ],
)
def test_a_ring_sends_the_bytes_of_an_all_gather(model: str, n_held: int, make: Make) -> None:
    """n-1 times a block is (n-1)/n of the whole."""
    for form in (ContextForm.RING, ContextForm.ALLGATHER):
        rows = predict(make(model, "cp=4,tp=2", program=Program(context=form)))
        place = (Phase.PREFILL, "cp", ATTN)
        sent = sum(r.wire_bytes * r.count for r in rows if (r.phase, r.axis, r.part) == place)
        assert sent == n_held * 2 * 128 * 3 // 4


@pytest.mark.parametrize(("output", "n_steps"), [(1, {1}), (2, {1}), (128, {1, 127})])
def test_decode_exists_only_with_decode_steps(output, n_steps, make, small) -> None:
    rows = predict(make(small, "tp=4", output=output))
    assert {r.n_steps for r in rows} == n_steps
    assert {r.phase for r in rows} == ({Phase.PREFILL} if output == 1 else set(REQUEST_PHASES))


@pytest.mark.parametrize("plan", PLANS)
def test_groups_match_their_axis_and_an_axis_of_size_one_costs_nothing(plan, make) -> None:
    experiment = make("Llama-3.1-8B", plan, batch=8)
    rows = predict(experiment)
    ones = {"dp", "tp"} if plan == "tp=1" else {"dp"}
    assert {r.axis for r in rows} == set(experiment.plan.mesh.names) - ones
    for row in rows:
        assert row.group_size > 1
        assert experiment.plan.mesh.axis_of_groups(row.groups) == row.axis


@pytest.mark.parametrize("phase", REQUEST_PHASES)
def test_sp_sends_what_plain_tp_sends_and_the_last_token_besides(phase: Phase, make: Make) -> None:
    """A reduce-scatter and an all-gather send what an all-reduce does.

    The gather of the last block's sum is replaced by that of the last token alone: there are n
    reduce-scatters and n - 1 gathers of [b,s,D].
    """
    plain, split = (
        [r for r in predict(make("Llama-3.1-8B", plan, batch=8)) if r.phase is phase]
        for plan in ("tp=8", "tp=8,sp")
    )
    last, unpaired = (next(r for r in split if r.part is part) for part in (LM_HEAD, EMBED))
    expected = sum(r.wire_bytes for r in plain) - unpaired.wire_bytes + last.wire_bytes
    assert sum(r.wire_bytes for r in split) == expected


@table
def test_fsdp_gathers_every_matrix_once_a_step_a_tied_table_too(model, plan, make) -> None:
    """fsdp gathers what a device holds without fsdp, except norms and biases."""
    experiment = make(model, plan, batch=8)
    model, without_fsdp = experiment.model, Plan(tp=experiment.plan.tp)
    tables = [w for w in outer_weights(model, without_fsdp) if len(w.shape) == 2]
    weights = layer_weights(model, without_fsdp, model.layers[0])
    matrices = [w for w in weights if w.name.startswith("w")] * model.n_layers
    n_elements = sum(prod(w.local_shape(without_fsdp)) for w in (*tables, *matrices))
    for phase in REQUEST_PHASES:
        gathered = [r for r in predict(experiment) if r.axis == "fsdp" and r.phase is phase]
        assert sum(r.payload_bytes or 0 for r in gathered) == n_elements * 2


def test_rows_have_the_dtypes_of_their_arrays_and_cross_slices_in_groups_over_two(
    make: Make, small: Model
) -> None:
    dtypes = {"weight_dtype": "s8", "activation_dtype": "f32", "cache_dtype": "bf16"}
    rows = predict(make(small, "fsdp=2,tp=4", batch=8, **dtypes))
    assert {(r.axis, r.dtype) for r in rows} == {("fsdp", "s8"), ("tp", "f32")}
    rows = predict(make("Llama-3.1-8B", "fsdp=2,tp=8", topology="2xv6e-8", batch=8))
    assert {(r.axis, r.crosses_slices) for r in rows} == {("fsdp", True), ("tp", False)}


def test_rows_are_in_program_order(make: Make, small: Model) -> None:
    rows = predict(make(small, "tp=4", output=2))
    order = [(r.phase, r.layer, r.part) for r in rows]
    one_step = [(None, EMBED), (0, ATTN), (0, MLP), (1, ATTN), (1, MLP), (None, LM_HEAD)]
    assert order == [(phase, *place) for phase in REQUEST_PHASES for place in one_step]


def test_a_thousand_devices_share_one_tuple_of_groups(make: Make) -> None:
    """Sharing keeps a prediction for 1,024 devices within milliseconds."""
    rows = predict(make("Qwen3-32B", "fsdp=16,tp=64", batch=64))
    axes = {axis: {id(r.groups) for r in rows if r.axis == axis} for axis in ("fsdp", "tp")}
    assert {axis: len(ids) for axis, ids in axes.items()} == {"fsdp": 1, "tp": 1}


@pytest.mark.parametrize("plan", ["dp=2,tp=4", "dp=2,tp=4,sp", "tp=8"])
def test_chunks_repeat_the_collectives_of_a_smaller_batch(make: Make, plan: str) -> None:
    """A prefill of 16 sequences in four chunks has those of four sequences, four times."""
    model = "Llama-3.1-8B"
    whole = make(model, plan, batch=16, prompt=128)
    n_local = 16 // whole.plan.data_size
    workload = replace(whole.workload, prefill_chunk=n_local // 4 * 128)
    chunked = predict(replace(whole, workload=workload))
    quarter = predict(make(model, plan, batch=4, prompt=128))

    prefill = [row for row in chunked if row.phase is Phase.PREFILL]
    expected = [replace(row, count=4 * row.count) for row in quarter if row.phase is Phase.PREFILL]
    assert prefill == expected
    decode = [row for row in chunked if row.phase is Phase.DECODE]
    assert decode == [row for row in predict(whole) if row.phase is Phase.DECODE]


def _staged_rows(rows: list[Collective], phase: Phase) -> list[tuple[object, ...]]:
    return [
        (r.stage, r.layer, r.part, r.kind, r.axis, r.groups, r.dtype, r.shape, r.count)
        for r in rows
        if r.phase is phase
    ]


def _with(experiment: Experiment, microbatches: int) -> Experiment:
    return replace(experiment, program=Program(microbatches=microbatches))


def test_all_rows_of_a_two_stage_pipeline(make: Make, small: Model) -> None:
    """Two layers, D64, V101 stored as 102 over tp=2; 8 sequences of 12 tokens in 4 micro-batches."""
    experiment = _with(make(small, "pp=2,tp=2", batch=8, prompt=12, output=2), 4)
    tp_0, tp_1, pp = ((0, 1),), ((2, 3),), ((0, 2), (1, 3))
    # In prefill, stages send in 4 + 2 - 1 ticks.
    for phase, part, n, n_sends in (
        (Phase.PREFILL, (2, 12, 64), 4, 5),
        (Phase.DECODE, (8, 1, 64), 1, 2),
    ):
        assert _staged_rows(predict(experiment), phase) == [
            (0, None, Part.EMBED, AR, "tp", tp_0, "bf16", part, n),
            (0, 0, Part.ATTN, AR, "tp", tp_0, "bf16", part, n),
            (0, 0, Part.MLP, AR, "tp", tp_0, "bf16", part, n),
            (0, None, Part.STAGE, CP, "pp", pp, "bf16", part, n_sends),
            (1, 1, Part.ATTN, AR, "tp", tp_1, "bf16", part, n),
            (1, 1, Part.MLP, AR, "tp", tp_1, "bf16", part, n),
            (1, None, Part.LM_HEAD, AG, "tp", tp_1, "bf16", (8, 102), 1),
            (None, None, Part.SAMPLE, AR, "pp", pp, "s32", (8,), 1),
        ]


def test_under_sp_a_stage_sends_the_local_shard(make: Make) -> None:
    rows = predict(make("Llama-3.1-8B", "pp=4,tp=2,sp", batch=8, prompt=128))
    sent = {(r.phase, r.stage, r.shape) for r in rows if r.part is Part.STAGE}
    shapes = {(Phase.PREFILL, (2, 64, 4096)), (Phase.DECODE, (4, 1, 4096))}
    assert sent == {(phase, stage, shape) for phase, shape in shapes for stage in range(3)}


@pytest.mark.parametrize("plan", ["pp=4,tp=2", "pp=2,dp=2,tp=2", "pp=3,fsdp=2", "pp=4,tp=2,sp"])
def test_the_rows_of_a_stage_are_those_of_its_devices(plan: str, make: Make) -> None:
    experiment = make("Llama-3.1-8B", plan, batch=8, prompt=128)
    n_per_stage = experiment.plan.n_devices // experiment.plan.pp
    for row in predict(experiment):
        if row.stage is not None:
            assert {group[0] // n_per_stage for group in row.groups} == {row.stage}


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_layers_send_the_same_bytes_however_the_batch_is_cut(make: Make, microbatches: int) -> None:
    whole = make("Llama-3.1-8B", "tp=2", batch=8, prompt=128)
    parts = _with(make("Llama-3.1-8B", "pp=4,tp=2", batch=8, prompt=128), microbatches)
    one, many = (
        step_totals([row for row in predict(of) if row.layer is not None]) for of in (whole, parts)
    )
    for phase in REQUEST_PHASES:
        assert many[phase].wire_bytes == one[phase].wire_bytes
        assert many[phase].payload_bytes == one[phase].payload_bytes


def test_a_tied_table_is_gathered_by_both_ends(make: Make) -> None:
    rows = predict(make("Llama-3.2-3B", "pp=2,fsdp=2", batch=4, prompt=8, output=1))
    gathers = [
        (r.stage, r.part, r.shape, r.count) for r in rows if r.axis == "fsdp" and r.layer is None
    ]

    assert gathers == [(0, Part.EMBED, (128256, 3072), 2), (1, Part.LM_HEAD, (128256, 3072), 1)]


def test_stages_are_compared_each_with_its_own(make: Make) -> None:
    """Most rows differ by layer; a stage send is identified by its stage and its pairs."""
    rows = predict(make("Llama-3.1-8B", "pp=4,tp=2", batch=8))
    assert compare(rows, rows).is_exact
    first = next(row for row in rows if row.part is Part.STAGE)
    moved = [replace(row, stage=2) if row is first else row for row in rows]

    changed = compare(rows, moved).with_verdict(Verdict.CHANGED, Phase.PREFILL)

    assert [(m.note, m.count, m.shown.part) for m in changed] == [
        ("in another stage", first.count, Part.STAGE)
    ]


def _predicted(chunk: int | str, **options: str) -> meshscope.Run:
    plan = options.pop("plan", "cp=4,tp=2")
    return meshscope.predict(
        "meta-llama/Llama-3.1-8B",
        topology="v6e-8",
        plan=plan,
        prompt=65536,
        prefill_chunk=chunk,
        **options,
    )


def test_each_chunk_gathers_queries_and_returns_outputs_and_sums() -> None:
    """16 chunks of 4,096 positions in 32 layers; 16 of 32 heads on each device, of 128 channels."""
    rows = [r for r in _predicted(4096).record.rows if r.axis == "cp" and r.layer is not None]
    prefill = {(r.kind, r.dtype, r.shape): r.count for r in rows if r.phase is Phase.PREFILL}

    assert prefill == {
        (Kind.ALL_GATHER, "bf16", (1, 4096, 16, 128)): 16,
        (Kind.ALL_TO_ALL, "bf16", (4, 1, 1024, 2048)): 16,
        (Kind.ALL_TO_ALL, "f32", (4, 1, 1024, 16)): 16,
    }


def test_chunks_share_the_work_that_the_last_device_has_for_a_whole_prompt() -> None:
    """The last of four devices has 7/4 of the mean in a whole prompt, in 16 chunks 1 + 3/4/16 of it."""
    whole, chunks = (
        next(part.flops for part in _predicted(chunk).record.times[0].parts if part.part == "attn")
        for chunk in ("off", 4096)
    )
    mean_pairs = 65536**2 / 2 / 4
    flops_of_pair = 4 * 128 * 16 * 32  # two products, 128 channels, 16 heads of a device, 32 layers
    expected = flops_of_pair * mean_pairs * (3 / 4 - 3 / 4 / 16)
    assert whole - chunks == pytest.approx(expected, rel=0.02)  # blocks on the diagonal are whole


def test_sequences_in_chunks_of_whole_prompts_keep_the_ring() -> None:
    options = {"topology": "v6e-8", "plan": "cp=2,tp=4", "batch": 4, "prompt": 1024}
    chunked, whole = (
        meshscope.predict("meta-llama/Llama-3.1-8B", **options, prefill_chunk=chunk)
        for chunk in (2048, "off")
    )
    permutes = [
        [(r.shape, r.count) for r in run.record.rows if r.kind is Kind.PERMUTE]
        for run in (chunked, whole)
    ]
    assert set(permutes[0]) == {((2, 512, 2, 128), 2)}
    assert set(permutes[1]) == {((4, 512, 2, 128), 1)}


def test_blocks_of_linear_attention_compute_how_they_map_the_state() -> None:
    """4,096 tokens of a device in three linear layers: 32 heads of keys and values of 128, over tp=4."""
    whole, split = (
        meshscope.predict(
            "Qwen/Qwen3.5-9B", topology="v6e-8", plan=plan, batch=2, prompt=4096, layers=3
        )
        for plan in ("dp=2,tp=4", "cp=2,tp=4")
    )
    flops = [
        next(part.flops for part in run.record.times[0].parts if part.part == "attn")
        for run in (whole, split)
    ]
    of_token = 32 * (6 * 128**2 + 2 * 64 * 128 + 2 * 128**2)  # chunks of 64 tokens
    of_sequence = 6 * 2 * 32 * 2 * 128**3  # two blocks, in six passes of bfloat16
    assert flops[1] - flops[0] == pytest.approx(3 * (4096 * of_token + 2 * of_sequence) / 4)


def test_groups_and_layers_are_rows_of_their_stage(make: Make) -> None:
    """"""
    rows = predict(make("Llama-3.2-3B", "pp=3,tp=2", engine=Engine.VLLM))
    groups = {(r.stage, r.groups) for r in rows if r.axis == "tp"}
    assert groups == {(n, ((2 * n, 2 * n + 1),)) for n in range(3)}
    layers = {(r.layer, r.stage) for r in rows if r.layer is not None}
    assert layers == {(n, (n > 8) + (n > 18)) for n in range(28)}
    rows = predict(make("Llama-3.1-8B", "pp=4,tp=2", engine=Engine.VLLM))
    for phase in REQUEST_PHASES:
        sent, received = (
            {r.stage: r for r in rows if r.kind is kind and r.phase is phase}
            for kind in (Kind.SEND, Kind.RECV)
        )
        pairs = {n: ((2 * n, 2 * n + 2), (2 * n + 1, 2 * n + 3)) for n in range(3)}
        assert {stage: row.groups for stage, row in sent.items()} == pairs
        assert received == {
            n + 1: replace(row, kind=Kind.RECV, stage=n + 1, wire_bytes=0)
            for n, row in sent.items()
        }


@pytest.mark.parametrize(
    ("plan", "n_rows", "axes", "stages"),
    [("tp=1", 0, set(), set()), ("pp=4", 12, {"pp"}, {0, 1, 2, 3}), ("tp=4", 132, {"tp"}, {None})],
)
def test_an_axis_of_size_one_costs_nothing(plan, n_rows, axes, stages, make) -> None:
    rows = predict(make("Llama-3.1-8B", plan, engine=Engine.VLLM))
    assert (len(rows), {r.axis for r in rows}, {r.stage for r in rows}) == (n_rows, axes, stages)


def test_tokens_of_a_batch_share_one_dimension(make: Make, small: Model) -> None:
    """And rows name their part of the model."""
    rows = predict(make(small, "pp=2,tp=2", engine=Engine.VLLM, batch=3, prompt=5, output=2))
    for phase, n in ((Phase.PREFILL, 15), (Phase.DECODE, 3)):
        assert {(r.part, r.kind, r.shape) for r in rows if r.phase is phase} == {
            (Part.EMBED, Kind.ALL_REDUCE, (n, 64)),
            (Part.ATTN, Kind.ALL_REDUCE, (n, 64)),
            (Part.MLP, Kind.ALL_REDUCE, (n, 64)),
            (Part.STAGE, Kind.SEND, (n, 32)),
            (Part.STAGE, Kind.RECV, (n, 32)),
            (Part.STAGE, Kind.ALL_GATHER, (n, 64)),
            (Part.LM_HEAD, Kind.GATHER, (3, 64)),  # of 101 rows, padded to 128
        }


def test_what_vllm_cannot_split_is_refused(make: Make, small: Model) -> None:
    """Heads that tp=3 divides, but no vocabulary or boundary; and a table that a worker lacks."""
    heads = replace(small, attention=replace(small.attention, n_heads=6, n_kv_heads=3))
    divided = replace(heads, vocab=192)
    assert predict(make(divided, "tp=3", engine=Engine.VLLM))
    for model, plan, message in (
        (heads, "tp=3", r"tp=3 does not divide 128, .* of small .*Use a tp"),
        (divided, "pp=2,tp=3", r"tp=3 does not divide hidden=64 of small, .*Use a tp"),
        ("google/gemma-4-E2B-it", "tp=4", r"vLLM 0\.8\.5, which has no models with embeddings of"),
    ):
        with pytest.raises(PlanError, match=message):
            predict(make(model, plan, engine=Engine.VLLM))
