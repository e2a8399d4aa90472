"""Collectives that the TPU compiler implements as all-reduces, predicted as they compile."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made import experiment_with
from tables import table

import meshscope
from meshscope.analysis.join import Verdict, compare
from meshscope.cost.collectives import predict
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend

QWEN = "Qwen/Qwen3-4B"  # 151,936 logits: 18,992 on each of 8 devices, 148 x 128 + 48
LLAMA = "meta-llama/Llama-3.1-8B"  # 128,256: 64,128 on each of 2, a multiple of 128


def _experiment(
    plan: str, batch: int, model: str = QWEN, topology: str = "v6e-8", **more: Any
) -> Experiment:
    options = {"prompt": 256, "output": 8, "n_layers": 2, **more}
    return experiment_with(model, plan, topology, batch=batch, **options)


def _opcode(is_reduced: bool) -> set[str | None]:  # noqa: FBT001
    return {"all-reduce" if is_reduced else None}


@pytest.mark.parametrize("batch", [8, 64, 512])
def test_a_decode_step_of_sp_reduces_whole_arrays(batch: int):
    """Compiled for v6e-8 with batch 64: reduce-scatters that send 573 kB, not 287 kB, each."""
    rows = [r for r in predict(_experiment("tp=8,sp", batch)) if r.kind is Kind.REDUCE_SCATTER]
    facts = {(r.phase, r.opcode, r.wire_bytes / r.payload_bytes) for r in rows}
    assert facts == {(Phase.PREFILL, None, 7 / 8), (Phase.DECODE, "all-reduce", 7 / 4)}
    others = predict(_experiment("tp=8,sp", 8, topology="cpu:8"))
    assert {row.opcode for row in others} == {None}


@table
def test_a_single_row_of_logits_is_gathered_by_an_all_reduce(model, plan, batch, is_reduced):
    """Compiled for v6e-8: the logits of one sequence, 4,736 to 18,992 on each device."""
    experiment = _experiment(plan, batch, model, "v6e-8" if plan != "tp=2" else "v6e:1x2")
    logits = [row for row in predict(experiment) if row.part is Part.LM_HEAD]
    assert {row.opcode for row in logits} == _opcode(is_reduced)
    n, factor = experiment.plan.tp, 2 if is_reduced else 1
    assert all(r.wire_bytes == factor * r.payload_bytes * (n - 1) / n for r in logits)


@table
def test_row_counts_of_experts_are_gathered_by_an_all_reduce(
    model, topology, plan, n_counts, is_reduced
):
    """Compiled for v6e-8: all-reduces of 8 to 192 counts of 8 devices each, gathers of 128, 256, 384 and 512."""
    experiment = _experiment(plan, 64, model, topology, n_layers=4)
    counts = [row for row in predict(experiment) if row.dtype == "s32"]
    n, factor = experiment.plan.ep, 2 if is_reduced else 1
    assert {row.opcode for row in counts} == _opcode(is_reduced)
    assert {row.shape for row in counts} == {(n, n_counts)}
    assert {row.wire_bytes for row in counts} == {factor * n * n_counts * 4 * (n - 1) / n}


@table
def test_a_prefill_reduces_whole_arrays_of_a_sequence_or_over_a_slice(
    topology, plan, batch, prompt, is_reduced
):
    """Compiled with libtpu 0.0.42.1: `psum_scatter` of the same shapes over the same groups."""
    rows = predict(_experiment(plan, batch, topology=topology, prompt=prompt))
    scattered = [r for r in rows if r.kind is Kind.REDUCE_SCATTER and r.phase is Phase.PREFILL]
    assert {row.opcode for row in scattered} == _opcode(is_reduced)


@table
def test_last_positions_and_rows_of_tables_are_scattered_but_for_weights_of_streams(
    topology, plan, batch, reduced
):
    """`psum_scatter` compiled with libtpu 0.0.42.1: [b,n,streams] of any b, and arrays of one sequence, are summed whole."""
    model = "deepseek-ai/DeepSeek-V4.1-Flash"
    rows = predict(_experiment(plan, batch, model, topology, prompt=1024, n_layers=None))
    b, axis = batch // 2, "cp" if "cp" in plan else "tp"
    shapes = [(b, 1024, 6144)] if axis == "cp" else [(b, 1024, 6144), (b, 128, 20480), (b, 128, 4)]
    scatters = [r for r in rows if r.axis == axis and r.kind is Kind.REDUCE_SCATTER]
    is_reduced = {r.shape: r.opcode == "all-reduce" for r in scatters if r.shape in shapes}
    assert [is_reduced[shape] for shape in shapes] == reduced


@table
def test_rows_of_a_ragged_exchange_are_padded_to_512_bytes(model, topology, dtype, width):
    """Compiled for v5e-8: rows of 2,880 bf16 numbers are exchanged as bf16[512,2,1536], and of 2,880 floats as f32[512,1,2944]."""
    rows = predict(_experiment("fsdp=8,ep=8", 8, model, topology, activation_dtype=dtype))
    sent = [r for r in rows if r.part is Part.MOE_DISPATCH and r.kind is Kind.ALL_TO_ALL]
    assert len(sent) == 4
    assert {r.wire_bytes / r.payload_bytes * r.shape[-1] for r in sent} == {width * 7 / 8}


def _torchxla(plan: str, topology: str) -> Experiment:
    experiment = _experiment(plan, 8, topology=topology)
    return replace(experiment, program=replace(experiment.program, frontend=Frontend.TORCHXLA))


@pytest.mark.parametrize(("phase", "n_tokens"), [(Phase.PREFILL, 256), (Phase.DECODE, 1)])
def test_all_stages_of_a_torchxla_pipeline_compute_its_ends(phase: Phase, n_tokens: int):
    """As compiled for v6e-4: rows of no stage, and the last positions instead of sampled tokens."""
    rows = [r for r in predict(_torchxla("pp=2,tp=2", "v6e-4")) if r.phase is phase]
    ends = [(r.part, r.kind, r.axis, r.groups, r.shape, r.count) for r in rows if r.stage is None]
    both, across = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert ends == [
        (Part.EMBED, Kind.ALL_REDUCE, "tp", both, (8, n_tokens, 2560), 1),
        (Part.LM_HEAD, Kind.ALL_REDUCE, "pp", across, (8, 2560), 1),
        (Part.LM_HEAD, Kind.ALL_GATHER, "tp", both, (8, 151936), 1),
    ]
    assert {r.part for r in rows if r.stage is not None and r.layer is None} == {Part.STAGE}


COMPILED: dict[str, Any] = json.loads((Path(__file__).parent / "compiled_rows.json").read_text())
SUMMED_WHOLE = ("prefill", "mlp", "all_reduce", "all-reduce")
REMAINING = {
    ("v6e-8", "tp=8,sp", 1, 256): {SUMMED_WHOLE},
    ("v6e-16", "tp=16,sp", 16, 256): {SUMMED_WHOLE},
}


@pytest.mark.parametrize(
    "program",
    COMPILED["programs"],
    ids=lambda p: f"{p['frontend']}-{p['model']}-{p['topology']}-{p['plan']}-{p['batch']}",
)
def test_predictions_are_as_compiled_but_for_what_remains(program: dict[str, Any]):
    sizes = {name: program[name] for name in ("batch", "prompt", "prefill_chunk")}
    asked = (program["model"], program["plan"], program["topology"])
    experiment = experiment_with(*asked, n_layers=program["layers"], output=128, **sizes)
    frontend = Frontend(program["frontend"])
    experiment = replace(experiment, program=replace(experiment.program, frontend=frontend))
    compiled = [_row(dict(zip(COMPILED["columns"], row, strict=True))) for row in program["rows"]]
    differing = {
        (str(m.shown.phase), str(m.shown.part), str(m.shown.kind), m.shown.opcode)
        for m in compare(predict(experiment), compiled).matches
        if m.verdict is not Verdict.EQUAL
    }
    key = (program["topology"], program["plan"], program["batch"], program["prompt"])
    assert differing == REMAINING.get(key, set())


def _row(values: dict[str, Any]) -> Collective:
    shape, groups = values["shape"], tuple(map(tuple, values["groups"]))
    typed = {
        **{
            name: of(values[name])
            for name, of in (("phase", Phase), ("part", Part), ("kind", Kind))
        },
        "groups": groups,
        "shape": None if shape is None else tuple(shape),
        "group_size": len(groups[0]),
    }
    return Collective(source=Source.COMPILED, **{**values, **typed})


@table
def test_sums_of_whole_tiles_of_rows_are_scattered(model, plan, batch, wire_bytes):
    run = meshscope.predict(model, topology="tpu7x:2x2x1", plan=plan, batch=batch)
    rows = [r for r in run.record.rows if r.phase is Phase.DECODE and r.kind is Kind.REDUCE_SCATTER]
    assert {row.wire_bytes for row in rows} == {wire_bytes}


def test_wide_weights_are_converted_before_they_are_gathered() -> None:
    """Compiled for v6e-8, v5p-16 and tpu7x-8 with f32 weights: all gathers over fsdp are bf16."""
    rows = predict(_experiment("fsdp=8", 8, weight_dtype="f32"))
    assert {row.dtype for row in rows if row.axis == "fsdp"} == {"bf16"}
