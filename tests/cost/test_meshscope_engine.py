"""Predicted collectives of meshscope's own programs: row by row, and as invariant sums."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from made import experiment_with
from tables import read_rows, table

from meshscope.cost.collectives import predict
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Kind, Part, Phase
from meshscope.model.model import Model
from meshscope.plans.caches import ContextForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.program import Program
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


def test_half_of_the_layers_of_deepseek_v4_1_prefill_the_last_128_tokens() -> None:
    """Two sums of a row [b,s,5120] a layer as DeepSeek's reference has them, and the rows of two tables over tp."""
    rows = predict(experiment_with(plan="tp=8", batch=2, prompt=1024, **V41_STEP))
    assert _by_layer(rows, Phase.PREFILL) == {
        ("embed", AR, "tp", (2, 1024, 5120), "bf16", 1): 1,
        ("embed", AR, "tp", (2, 1024, 24, 256), "bf16", 2): 1,
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
        ("embed", AR, "tp", (2, 1, 24, 256), "bf16", 2): 1,
        ("attn", AR, "tp", (2, 1, 5120), "bf16", 1): 40,
        ("moe.combine", AR, "tp", (2, 1, 5120), "bf16", 1): 40,
        ("lm_head", AG, "tp", (2, 129_280), "bf16", 1): 1,
    }


def test_a_prompt_within_the_window_of_deepseek_v4_1_is_replayed_whole() -> None:
    rows = predict(experiment_with(plan="tp=8", batch=2, prompt=96, **V41_STEP))
    sums = [r.shape for r in rows if r.phase is Phase.PREFILL and r.part is ATTN]
    assert sums == [(2, 96, 5120)] * 40


def test_data_parallel_devices_share_the_tables_and_experts_of_deepseek_v4_1() -> None:
    """Hashes of all 8 sequences reach each device, whose rows are summed over all; experts have 6 rows a token."""
    step = V41_STEP | {"prefill_chunk": 1024}  # a sequence at a time
    rows = predict(experiment_with(plan="dp=2,tp=4,ep=8", batch=8, prompt=1024, **step))
    prefill, decode = (_by_layer(rows, phase) for phase in REQUEST_PHASES)
    assert prefill["embed", AG, "dp", (2, 1024, 2, 24), "s32", 4] == 1
    assert prefill["embed", AR, "dp+tp", (2, 1024, 24, 256), "bf16", 8] == 1
    assert decode["embed", AG, "dp", (8, 1, 2, 24), "s32", 1] == 1
    assert decode["embed", AR, "dp+tp", (8, 1, 24, 256), "bf16", 2] == 1
    for n_tokens, n_layers in (
        (1024 // 4, 20),
        (128 // 4, 20),
    ):  # tp splits the tokens of an exchange
        exchange = (Kind.ALL_TO_ALL, "dp+tp", (6 * n_tokens, 5120), "bf16", 4)
        assert prefill["moe.dispatch", *exchange] == prefill["moe.combine", *exchange] == n_layers
    assert decode["moe.dispatch", Kind.ALL_TO_ALL, "dp+tp", (6, 5120), "bf16", 1] == 40


def test_the_first_layers_of_deepseek_v4_1_have_the_tables_before_them() -> None:
    rows = predict(experiment_with(plan="tp=8", batch=2, prompt=256, n_layers=10, **V41_STEP))
    assert _by_layer(rows, Phase.DECODE)["embed", AR, "tp", (2, 1, 24, 256), "bf16", 1] == 1


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


def test_llama_3_1_8b_reduces_twice_a_layer_and_once_for_the_embedding(make: Make) -> None:
    """Xu et al., Table III counts the same 65 all-reduces for vLLM."""
    counts = Counter((r.phase, r.kind) for r in predict(make("Llama-3.1-8B", "tp=8")))
    assert counts == {
        (phase, kind): n for phase in REQUEST_PHASES for kind, n in ((AR, 65), (AG, 1))
    }


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


def test_weights_and_activations_use_their_dtypes(make: Make, small: Model) -> None:
    dtypes = {"weight_dtype": "s8", "activation_dtype": "f32", "cache_dtype": "bf16"}
    rows = predict(make(small, "fsdp=2,tp=4", batch=8, **dtypes))
    assert {(r.axis, r.dtype) for r in rows} == {("fsdp", "s8"), ("tp", "f32")}


def test_only_groups_over_two_slices_cross(make: Make) -> None:
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
