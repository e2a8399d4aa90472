"""Modeled steps as tables: parts sum to the whole, and steps to the request."""

import pytest

from meshscope.analysis.overlap import exposed_by_axis, modeled_latency, part_costs, step_time
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeEstimate


def made(phase: Phase, *, source: Source = Source.COMPILED, scale: float = 1.0) -> StepTime:
    parts = (
        PartCost(part="attn", compute_s=2 * scale, collective_s=1.5 * scale, exposed_s=1 * scale),
        PartCost(part="mlp", compute_s=1 * scale, collective_s=0.5 * scale, exposed_s=0.5 * scale),
    )
    return StepTime(
        source=source, phase=phase,
        step=TimeEstimate(value_s=5 * scale, low_s=4 * scale, high_s=7 * scale),
        compute_s=3 * scale, exposed_s=1.5 * scale, idle_s=0.5 * scale, bubble_s=0.25 * scale,
        collective_s=2 * scale, exposed_by_axis_s={"tp": 1 * scale, "dp": 0.5 * scale},
        by_basis_s={"compiler_cycles": 3 * scale, "interconnect_model": 1.5 * scale}, parts=parts,
    )  # fmt: skip


TIMES = (made(Phase.PREFILL), made(Phase.DECODE, scale=0.1))


def test_compute_exposed_and_idle_sum_to_the_step() -> None:
    for row in step_time(TIMES).iter_rows(named=True):
        assert row["compute_s"] + row["exposed_s"] + row["idle_s"] == pytest.approx(row["step_s"])
        assert row["overlap_frac"] == pytest.approx(0.25)
        assert row["exposed_frac"] == pytest.approx(0.3)
        assert row["collective_compute_ratio"] == pytest.approx(2 / 3)
        assert row["time_basis"] == "compiler_cycles+interconnect_model"


def test_axes_and_parts_sum_to_the_step() -> None:
    steps = {row["phase"]: row for row in step_time(TIMES).iter_rows(named=True)}
    for table in (exposed_by_axis(TIMES), part_costs(TIMES)):
        for phase, step in steps.items():
            assert table.filter(phase=phase)["exposed_s"].sum() == pytest.approx(step["exposed_s"])


def test_a_request_is_the_sum_of_its_steps() -> None:
    rows = {
        row["latency"]: row
        for row in modeled_latency(TIMES, n_decode_steps=20).iter_rows(named=True)
    }
    assert [rows[name]["mean_s"] for name in ("ttft", "tpot", "e2e")] == pytest.approx([5, 0.5, 15])
    assert (rows["e2e"]["low_s"], rows["e2e"]["high_s"]) == pytest.approx((12, 21))


def test_sources_have_separate_rows() -> None:
    both = (*TIMES, made(Phase.PREFILL, source=Source.PREDICTED, scale=2))
    table = modeled_latency(both, n_decode_steps=20)
    assert table.filter(source="predicted")["latency"].to_list() == ["ttft"]
    assert table.filter(source="compiled")["latency"].to_list() == ["ttft", "tpot", "e2e"]


def test_no_modeled_steps_are_an_empty_table() -> None:
    assert step_time(()).is_empty()
    assert modeled_latency((), n_decode_steps=3).is_empty()
