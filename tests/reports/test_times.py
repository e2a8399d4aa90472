"""Modeled times: figures with their interval, basis and caveats."""

from dataclasses import replace
from io import StringIO

import pytest
from made import estimate, part_cost, step_time
from rich.console import Console

from meshscope.events.enums import Phase
from meshscope.events.step_time import UnestimatedWork
from meshscope.plans.workload import Workload
from meshscope.reports.document import run_document
from meshscope.reports.times import caveat_lines, time_lines
from meshscope.store.run import RunRecord

PREFILL = step_time(
    Phase.PREFILL,
    estimate(0.2, 0.1, 0.4),
    0.12,
    exposed_s=0.06,
    idle_s=0.02,
    collective_s=0.1,
    exposed_by_axis_s={"tp": 0.05, "fsdp": 0.01},
    by_basis_s={"compiler_cycles": 0.12, "interconnect_model": 0.06},
    parts=(part_cost("mlp", 0.12, collective_s=0.1, exposed_s=0.06),),
    unestimated=(
        UnestimatedWork(
            opcode="frobnicate", count=3, seconds=estimate(0.02, 0.0, 0.2), is_known=False
        ),
    ),
    is_extrapolated=True,
    notes=("a caveat",),
)
DECODE = replace(PREFILL, phase=Phase.DECODE, step=estimate(0.002))


@pytest.fixture
def timed_run(compiled_run: RunRecord) -> RunRecord:
    experiment = replace(compiled_run.manifest.experiment, workload=Workload(output=11))
    manifest = replace(compiled_run.manifest, experiment=experiment)
    return replace(compiled_run, manifest=manifest, times=(PREFILL, DECODE))


def _text(run: RunRecord) -> str:
    console = Console(width=100, record=True, file=StringIO())
    for part in (*time_lines(run), *caveat_lines(run)):
        console.print(part)
    return console.export_text()


def test_text_has_every_figure_with_interval_basis_and_caveat(timed_run: RunRecord):
    text = " ".join(_text(timed_run).split())
    assert "step 200 ms 2 ms" in text
    assert "range 100 to 400 ms unknown" in text
    assert "exposed over tp 50 ms (25%)" in text
    assert "hidden behind compute 40 ms" in text
    assert (
        "compiled request: 220 ms end to end, 50 request tokens/s; "
        "basis compiler_cycles+interconnect_model, extrapolated" in text
    )
    assert "no cycles for 10.0% of the compiled step (0.0% to 100.0%)" in text
    assert "3 x frobnicate 20 ms (unknown operation)" in text
    assert text.count("a caveat") == 1


def test_document_has_the_same_figures(timed_run: RunRecord):
    time = run_document(timed_run)["time"]
    assert (time["ttft_s"], time["tpot_s"], time["e2e_s"]) == pytest.approx((0.2, 0.002, 0.22))
    assert time["basis"] == "compiler_cycles+interconnect_model"
    assert time["intervals"]["ttft_s"] == [0.1, 0.4]
    assert time["intervals"]["e2e_s"] == [None, None]
    assert time["is_extrapolated"]
    assert time["steps"]["prefill"]["step"] == {"s": 0.2, "low_s": 0.1, "high_s": 0.4}
    assert time["steps"]["prefill"]["unestimated_frac"] == pytest.approx(0.1)


def test_a_run_without_modeled_steps_prints_nothing_and_has_nulls(compiled_run: RunRecord):
    assert _text(compiled_run) == ""
    assert set(run_document(compiled_run)["time"].values()) == {None}
    assert "roofline" not in run_document(compiled_run)
