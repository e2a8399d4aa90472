"""Profiles that others recorded, read from the folder that MESHSCOPE_TRACES names.

The figures were counted and added from the events of the files without this package. The
profiles are those of facebookresearch/HolisticTraceAnalysis (tests/data at f4d0062c382f, MIT),
AMD-AGI/TraceLens (tests/traces/inference at 171dd74721ca, MIT) and openxla/xprof
(test_xplanes/tpu_inference_2.xplane.pb at 01d85deb6a7a, Apache-2.0); they are not distributed here.
"""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import meshscope
from meshscope import Run
from meshscope.events.enums import Kind, Phase, Source
from meshscope.events.measured import Measured, StepLabel, TraceFacts

VARIABLE = "MESHSCOPE_TRACES"
FOLDER = Path(os.environ.get(VARIABLE, ""))
pytestmark = pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no folder with profiles of others"
)


def imported(tmp_path: Path, *names: str, **options: str) -> Run:
    return meshscope.import_([FOLDER / name for name in names], out=tmp_path / "run", **options)


def facts_of(run: Run) -> tuple[Measured, TraceFacts]:
    measured = run.record.measured
    assert measured.trace is not None
    return measured, measured.trace


def test_a100_kernels_carry_sizes_and_ranks(tmp_path: Path) -> None:
    """15 all-reduces of f32 and 6 broadcasts in 3 steps; rank 0 of 2."""
    run = imported(tmp_path, "kineto-nccl/a100_2rank_rank0.json.gz", topology="a100:2", plan="tp=2")
    rows = run.record.rows
    assert {(row.kind, row.dtype, row.payload_bytes): row.count * row.n_steps for row in rows} == {
        (Kind.ALL_REDUCE, "f32", 4 * 6_637_568): 3,
        (Kind.ALL_REDUCE, "f32", 4 * 2_431_040): 3,
        (Kind.ALL_REDUCE, "f32", 4 * 2_049_000): 3,
        (Kind.ALL_REDUCE, "f32", 4 * 7_875_584): 3,
        (Kind.ALL_REDUCE, "f32", 4 * 6_563_840): 3,
        (Kind.BROADCAST, "f32", 4 * 53_120): 3,
        (Kind.BROADCAST, "s64", 8 * 53): 3,
    }
    assert {(row.axis, row.groups, row.n_steps) for row in rows} == {("tp", ((0, 1),), 3)}
    total_s = sum((row.dur_s or 0) * row.count * row.n_steps for row in rows)
    assert total_s == pytest.approx(46.876493e-3, abs=1e-9)
    measured, facts = facts_of(run)
    assert (facts.n_events, facts.n_ops, facts.devices, facts.n_devices) == (40_573, 3_774, (0,), 2)
    assert any(finding.startswith("1 of 2 ranks have a trace (0)") for finding in measured.findings)


def test_v100_kernels_have_no_sizes(tmp_path: Path) -> None:
    """2,020 all-reduces without sizes in 5 steps, 357,343 us in all; rank 1 of 2."""
    run = imported(tmp_path, "kineto-nccl/v100_rank1_2020_allreduce.json.gz")
    (row,) = run.record.rows
    assert (row.kind, row.dtype, row.count, row.n_steps) == (Kind.ALL_REDUCE, "f32", 404, 5)
    assert (row.payload_bytes, row.wire_bytes, row.axis, row.groups) == (None, None, None, ())
    assert row.dur_s == pytest.approx(357_343e-6 / 2_020, abs=1e-12)
    measured, facts = facts_of(run)
    assert (facts.n_events, facts.n_ops, facts.devices) == (216_092, 22_290, (1,))
    assert any("the bytes of 2,020 'ncclKernel_AllReduce" in text for text in measured.findings)


def test_kernels_named_after_others_take_the_collective_of_their_launch(tmp_path: Path) -> None:
    """All 10 kernels of each rank are `SendRecv`; the program called three kinds of collectives."""
    run = imported(
        tmp_path, "kineto-nccl/128ranks_rank0_cut.json.gz", "kineto-nccl/128ranks_rank1_cut.json.gz"
    )
    measured, facts = facts_of(run)
    assert (facts.n_events, facts.devices, facts.n_devices) == (9_575, (0, 1), 128)
    executions = Counter[Kind]()
    for time in measured.times:
        executions[time.kind] += time.n_executions
    assert executions == {Kind.ALL_TO_ALL: 8, Kind.ALL_REDUCE: 8, Kind.ALL_GATHER: 4}
    sizes = {row.payload_bytes for row in run.record.rows if row.kind is Kind.ALL_REDUCE}
    assert sizes == {4 * n for n in (19_618_307, 26_955_536, 26_258_430, 5_716_654)}
    assert any(finding.startswith("2 of 128 ranks have a trace") for finding in measured.findings)


def test_a_step_of_vllm_with_8155_of_8192_tokens_in_prefill_is_prefill(tmp_path: Path) -> None:
    """413 kernels and 10 copies in one step of 156,466 us, from the first copy to the last kernel."""
    run = imported(tmp_path, "kineto-vllm-qwen3-8b/graph_execution.json.gz")
    measured, facts = facts_of(run)
    (step,) = facts.steps
    assert (step.label, step.n_steps) == (StepLabel.PREFILL, 1)
    assert (step.prefill_tokens, step.decode_tokens) == (8155, 37)
    assert step.mean_s == pytest.approx(156_466.417e-6, abs=1e-8)
    assert facts.n_ops == 423
    (load,) = measured.loads
    assert load.phase is Phase.PREFILL
    assert load.busy_s == pytest.approx(156_085.799e-6, abs=1e-7)
    assert run.record.rows == ()


def test_tpu_xplane_has_three_all_reduces_of_5_gb_on_four_of_eight_chips(tmp_path: Path) -> None:
    """`f32[5,1024,1024,256]` in groups {0,4}, {1,5}, {2,6}, {3,7}; 121.69 to 121.72 ms each."""
    run = imported(tmp_path, "tpu-v6e-xplane", topology="v6e-8", plan="dp=2,tp=4")
    rows = run.record.rows_of(Source.MEASURED)
    assert {(row.dtype, row.payload_bytes, row.axis) for row in rows} == {
        ("f32", 5_368_709_120, "dp")
    }
    assert {row.groups for row in rows} == {((0, 4), (1, 5), (2, 6), (3, 7))}
    assert [(row.count, row.n_steps) for row in rows] == [(1, 3)]
    untimed = {"start_s": None, "dur_s": None, "exposed_s": None, "time_basis": None}
    (compiled,) = run.record.rows_of(Source.COMPILED)
    assert [replace(row, source=Source.COMPILED, **untimed) for row in rows] == [compiled]
    assert all(121.6e-3 < (row.dur_s or 0) < 121.8e-3 for row in rows)
    comparison = run.compare()
    assert (comparison.left.source, comparison.right.source) == (Source.COMPILED, Source.MEASURED)
    assert comparison.is_equal
    measured, facts = facts_of(run)
    assert len(facts.devices) == 4
    assert any(finding.startswith("4 of 8 ranks have a trace") for finding in measured.findings)
