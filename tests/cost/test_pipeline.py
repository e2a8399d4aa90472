"""Predicted collectives of the pipeline: per stage, per micro-batch, and the stage sends."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshscope.analysis.join import Verdict, compare
from meshscope.analysis.totals import step_totals
from meshscope.cost.collectives import predict
from meshscope.cost.memory import predicted_memory
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Kind, Part, Phase
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Program

Make = Callable[..., Experiment]
AR, AG, RS, PERMUTE = Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.PERMUTE


def _rows(rows: list[Collective], phase: Phase) -> list[tuple[object, ...]]:
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
        assert _rows(predict(experiment), phase) == [
            (0, None, Part.EMBED, AR, "tp", tp_0, "bf16", part, n),
            (0, 0, Part.ATTN, AR, "tp", tp_0, "bf16", part, n),
            (0, 0, Part.MLP, AR, "tp", tp_0, "bf16", part, n),
            (0, None, Part.STAGE, PERMUTE, "pp", pp, "bf16", part, n_sends),
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


# Elements of Llama-3.2-3B, stored in bf16: a layer 2 x 3072 x 3072 + 2 x 3072 x 1024 + 3 x 3072 x 8192
# + 2 x 3072 of norms; the tied embedding 128256 x 3072; a layer of cache 2 x 256 x 8 x 128.
LAYER = 2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192 + 2 * 3072
OUTER, CACHE = 128256 * 3072 + 3072, 2 * 256 * 1024


@pytest.mark.parametrize(("plan", "n_stored"), [("pp=2", 14), ("pp=3", 10), ("pp=28", 1)])
def test_every_stage_allocates_the_largest_number_of_layers_and_both_tables(
    plan, n_stored, make
) -> None:
    """28 layers over three stages are 9, 10, 9: one program allocates 10 on each stage."""
    memory = predicted_memory(make("Llama-3.2-3B", plan))
    held = (2 * (n_stored * LAYER + OUTER), 2 * n_stored * CACHE)
    assert (memory.weights_bytes, memory.kv_cache_bytes) == held


def test_each_kind_of_layer_is_allocated_separately(make: Make) -> None:
    """DeepSeek-V2-Lite: one dense layer and 26 of experts; 14 and 13 layers."""
    memory = predicted_memory(make("DeepSeek-V2-Lite", "pp=2"))
    assert memory.kv_cache_bytes == 2 * (1 + 13) * 256 * (512 + 64)
