"""Why A beats B in sentences: the figures are those of the runs, and what is not known is said."""

import json
from dataclasses import replace

import pytest

from meshscope.report.explanation import explanation_document, phase_changes, sentences
from meshscope.rundir.run import Run
from meshscope.table.kinds import Kind, Phase, Source
from meshscope.table.timed import PartCost, Seconds, StepTime


def step(run_s: float, phase: Phase = Phase.PREFILL, *, exposed_s: float = 1.0) -> StepTime:
    return StepTime(
        source=Source.PREDICTED, phase=phase, step=Seconds(s=run_s, low_s=run_s, high_s=run_s),
        compute_s=run_s - exposed_s, exposed_s=exposed_s, idle_s=0.0, bubble_s=0.0,
        collective_s=exposed_s, exposed_by_axis_s={"tp": exposed_s},
        by_basis_s={"interconnect_model": exposed_s, "roofline": run_s - exposed_s},
        parts=(
            PartCost(part="mlp", compute_s=run_s - exposed_s, collective_s=exposed_s, exposed_s=exposed_s),
        ),
    )  # fmt: skip


def with_times(run: Run, *times: StepTime) -> Run:
    return replace(run, times=times)


def told(left: Run, right: Run) -> list[str]:
    return sentences(
        phase_changes((left, Source.PREDICTED), (right, Source.PREDICTED)), left="A", right="B"
    )


def test_the_reason_is_told_with_its_axis_and_part(predicted_run: Run) -> None:
    slow = with_times(
        predicted_run, step(5.0, exposed_s=1.0), step(0.5, Phase.DECODE, exposed_s=0.1)
    )
    fast = with_times(
        predicted_run, step(3.0, exposed_s=0.5), step(0.5, Phase.DECODE, exposed_s=0.1)
    )
    text = told(slow, fast)
    assert (
        "prefill: a step takes 3 s in B and 5 s in A, -2 s (-40%): compute -1.5 s, exposed communication "
        "over tp -500 ms, most of it in mlp (-2 s) (by roofline+interconnect_model)."
    ) in text
    assert text[-1] == (
        "B is faster than A: a request takes 7.5 s in B and 9.5 s in A, -2 s (-21%), of which prefill -2 s, "
        "decode 0 us."
    )


def test_intervals_that_overlap_leave_a_doubt(predicted_run: Run) -> None:
    def wide(run_s: float) -> StepTime:
        made = step(run_s)
        return replace(made, step=Seconds(s=run_s, low_s=run_s - 1, high_s=run_s + 1))

    def timed(run_s: float) -> Run:
        return with_times(predicted_run, wide(run_s), step(0.5, Phase.DECODE, exposed_s=0.1))

    near, far = told(timed(5.0), timed(4.0)), told(timed(9.0), timed(4.0))
    assert "Their intervals overlap (8.5 s to 10.5 s in A, 7.5 s to 9.5 s in B)" in near[-1]
    assert "overlap" not in far[-1]


def test_times_on_one_side_decide_nothing(predicted_run: Run) -> None:
    timed = with_times(predicted_run, step(5.0), step(0.5, Phase.DECODE))
    assert told(timed, predicted_run)[-1] == (
        "Which one is faster is not known: nothing timed or modelled a step of B."
    )


def test_equal_times_are_called_the_same(predicted_run: Run) -> None:
    timed = with_times(predicted_run, step(5.0), step(0.5, Phase.DECODE))
    assert told(timed, timed)[-1].startswith("Both take the same time for a request")


def test_kinds_that_changed_are_told_together(predicted_run: Run) -> None:
    rows = tuple(
        replace(row, kind=Kind.REDUCE_SCATTER) if row.kind is Kind.ALL_REDUCE else row
        for row in predicted_run.rows
    )
    text = "\n".join(told(predicted_run, replace(predicted_run, rows=rows)))
    assert "for attn over tp B has 3 reduce-scatters where A has 3 all-reduces" in text
    assert "for embed over tp B has 1 reduce-scatter where A has 1 all-reduce" in text


def test_bytes_are_those_of_the_rows(predicted_run: Run) -> None:
    fewer = replace(predicted_run, rows=predicted_run.rows[4:])
    assert told(predicted_run, fewer)[0].startswith("prefill: B sends 12.3 kB (")


def test_the_document_has_the_same_figures(predicted_run: Run) -> None:
    timed = with_times(predicted_run, step(5.0), step(0.5, Phase.DECODE, exposed_s=0.1))
    changes = phase_changes((timed, Source.PREDICTED), (timed, Source.PREDICTED))
    document = json.loads(json.dumps(explanation_document(changes, left="A", right="B")))
    assert document["request_s"] == {"left": 9.5, "right": 9.5}
    prefill = document["phases"]["prefill"]
    assert prefill["time"]["left"]["exposed_by_axis_s"] == {"tp": 1.0}
    assert prefill["time"]["step_s_change"] == 0
    wire = sum(place["left"]["wire_bytes"] for place in prefill["places"])
    rows = [row for row in timed.rows if row.phase is Phase.PREFILL]
    assert wire == pytest.approx(float(sum(row.count * row.wire_bytes for row in rows)))


def test_hostile_names_do_not_reach_the_terminal(predicted_run: Run) -> None:
    hostile = tuple(replace(row, axis="\x1b[31m<script>") for row in predicted_run.rows)
    text = "\n".join(told(predicted_run, replace(predicted_run, rows=hostile)))
    assert "\x1b" not in text
