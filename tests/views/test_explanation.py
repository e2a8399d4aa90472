"""Why A beats B in sentences: the figures are those of the runs, and what is not known is said."""

import json
from dataclasses import replace

import pytest

from meshscope.events.enums import Kind, Phase, Source
from meshscope.events.measured import Measured, Request
from meshscope.events.step_time import PartCost, StepTime, TimeEstimate
from meshscope.spec.experiment_record import ExperimentRecord, NamedModel
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.plan.plan import parse_plan
from meshscope.store.run import RunRecord
from meshscope.views.explanation import Explanation, explanation_of, sentences
from meshscope.views.explanation_document import explanation_document
from meshscope.views.side import Side


def step(run_s: float, phase: Phase = Phase.PREFILL, *, exposed_s: float = 1.0) -> StepTime:
    return StepTime(
        source=Source.PREDICTED, phase=phase, step=TimeEstimate(value_s=run_s, low_s=run_s, high_s=run_s),
        compute_s=run_s - exposed_s, exposed_s=exposed_s, idle_s=0.0, bubble_s=0.0,
        collective_s=exposed_s, exposed_by_axis_s={"tp": exposed_s},
        by_basis_s={"interconnect_model": exposed_s, "roofline": run_s - exposed_s},
        parts=(
            PartCost(part="mlp", compute_s=run_s - exposed_s, collective_s=exposed_s, exposed_s=exposed_s),
        ),
    )  # fmt: skip


def with_times(run: RunRecord, *times: StepTime) -> RunRecord:
    return replace(run, times=times)


def two(left: RunRecord, right: RunRecord) -> Explanation:
    return explanation_of(
        Side(name="A", run=left, source=left.manifest.source),
        Side(name="B", run=right, source=right.manifest.source),
    )


def told(left: RunRecord, right: RunRecord) -> list[str]:
    return sentences(two(left, right))


def test_the_reason_is_told_with_its_axis_and_part(predicted_run: RunRecord) -> None:
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


def test_the_largest_part_is_called_most_only_where_it_is(predicted_run: RunRecord) -> None:
    def parts(**seconds: float) -> RunRecord:
        costs = tuple(
            PartCost(part=n, compute_s=s, collective_s=0.0, exposed_s=0.0)
            for n, s in seconds.items()
        )
        made = replace(step(sum(seconds.values()), exposed_s=0.0), parts=costs)
        return with_times(predicted_run, made, step(0.5, Phase.DECODE))

    even = told(parts(attn=2.0, mlp=2.0, embed=1.0), parts(attn=3.0, mlp=3.0, embed=2.0))
    against = told(parts(attn=2.0, mlp=2.0, embed=1.0), parts(attn=5.0, mlp=0.5, embed=0.5))
    most = told(parts(attn=2.0, mlp=2.0), parts(attn=2.1, mlp=4.0))
    assert any("the largest change of a part in attn (+1 s)" in text for text in even)
    assert any("most of it in attn (+3 s)" in text for text in against)
    assert any("most of it in mlp (+2 s)" in text for text in most)


def test_equal_steps_tell_only_parts_that_change(predicted_run: RunRecord) -> None:
    def split(attn_s: float) -> RunRecord:
        halves = (("attn", attn_s), ("mlp", 4.0 - attn_s))
        costs = tuple(
            PartCost(part=n, compute_s=s, collective_s=0.0, exposed_s=0.0) for n, s in halves
        )
        made = replace(step(4.0, exposed_s=0.0), parts=costs)
        return with_times(predicted_run, made, step(0.5, Phase.DECODE))

    same = "prefill: a step takes the same time, within 0.5%: 4 s in B and 4 s in A (by "
    assert any(text.startswith(same) for text in told(split(1.0), split(1.0)))
    moved = next(text for text in told(split(1.0), split(3.0)) if "same time" in text)
    assert "in A, but attn +2 s, mlp -2 s (by " in moved


def test_what_a_measured_step_does_not_know_is_not_taken_for_nothing(
    predicted_run: RunRecord,
) -> None:
    timed = with_times(predicted_run, step(5.0), step(0.5, Phase.DECODE))
    measured = Measured(
        requests=(Request(prefill_s=2.0, decode_s=(0.1,)),),
        n_profiled_steps={}, loads=(), times=(), findings=(), costs=(),
    )  # fmt: skip
    manifest = replace(predicted_run.manifest, source=Source.MEASURED)
    rows = tuple(replace(row, source=Source.MEASURED) for row in predicted_run.rows)
    live = replace(predicted_run, manifest=manifest, rows=rows, measured=measured)
    text = told(live, timed)
    assert (
        "A was measured, B predicted: seconds that were measured stand beside seconds of a model."
        in text
    )
    seconds = next(one for one in text if one.startswith("prefill: a step takes"))
    assert seconds == (
        "prefill: a step takes 5 s in B and 2 s in A, +3 s (+150%) "
        "(A by measured, B by roofline+interconnect_model)."
    )


def _with(run: RunRecord, experiment: ExperimentRecord) -> RunRecord:
    return replace(run, manifest=replace(run.manifest, experiment=experiment))


def test_what_was_asked_otherwise_comes_first(predicted_run: RunRecord) -> None:
    ours = predicted_run.manifest.experiment
    other = _with(
        predicted_run,
        replace(ours, plan=parse_plan("tp=8,sp"), topology=parse_topology("v5p:2x2x2")),
    )
    assert told(predicted_run, other)[0] == (
        f"asked otherwise: slice v5p:2x2x2 in B and {ours.topology.name} in A; "
        f"plan tp=8,sp in B and {ours.plan} in A."
    )
    fewer = _with(predicted_run, replace(ours, model=NamedModel(name="tiny", n_layers=1)))
    assert (
        told(predicted_run, fewer)[1]
        == "A and B do not do the same work, for they differ in layers."
    )


def test_what_an_imported_run_does_not_say_is_no_difference(predicted_run: RunRecord) -> None:
    imported = _with(predicted_run, replace(predicted_run.manifest.experiment, model=None))
    assert told(predicted_run, imported)[0] == "not known of B: model and layers."
    assert "same work" not in "\n".join(told(predicted_run, imported))


def test_versions_differ_where_both_sides_have_one(predicted_run: RunRecord) -> None:
    def made(**versions: str) -> RunRecord:
        return replace(predicted_run, manifest=replace(predicted_run.manifest, versions=versions))

    newer = told(made(jax="0.10.2"), made(jax="0.12.0.1", torch_xla="2.9.0"))
    assert newer[0] == "asked otherwise: jax 0.12.0.1 in B and 0.10.2 in A."
    assert not any("torch_xla" in text for text in newer)


def test_what_rounding_leaves_is_no_change(predicted_run: RunRecord) -> None:
    slow = with_times(predicted_run, step(5.0, exposed_s=1.0), step(0.5, Phase.DECODE))
    fast = with_times(predicted_run, step(3.0, exposed_s=1.0 - 1e-15), step(0.5, Phase.DECODE))
    text = next(one for one in told(slow, fast) if one.startswith("prefill: a step takes"))
    assert "compute -2 s" in text
    assert "exposed" not in text


def test_a_phase_of_one_side_alone_is_said_to_be(predicted_run: RunRecord) -> None:
    rows = tuple(row for row in predicted_run.rows if row.phase is Phase.PREFILL)
    manifest = replace(predicted_run.manifest, phases=(Phase.PREFILL,))
    first = replace(predicted_run, manifest=manifest, rows=rows)
    text = told(first, predicted_run)
    alone = next(one for one in text if one.startswith("decode"))
    assert alone.startswith("decode is in B alone: ")
    assert text[-1] == "Which one is faster is not known: they do not have the same phases."


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (1.0, 1.009, "+0.9%"),
        (1.0, 0.6, "-40%"),
        (1000.0, 3.0, "-99.7%"),
        (1.0, 4.0, "+300%"),
        (1.0, 6.25, "x 6.2"),
        (1.0, 1017.9, "x 1,018"),
    ],
)
def test_shares_are_neither_nothing_nor_everything(
    predicted_run: RunRecord, ours: float, theirs: float, words: str
) -> None:
    left, right = (
        with_times(predicted_run, step(s, exposed_s=0.0), step(0.5, Phase.DECODE))
        for s in (ours, theirs)
    )
    text = next(one for one in told(left, right) if one.startswith("prefill: a step takes"))
    assert f"({words})" in text


def test_intervals_that_overlap_leave_a_doubt(predicted_run: RunRecord) -> None:
    def wide(run_s: float) -> StepTime:
        made = step(run_s)
        return replace(made, step=TimeEstimate(value_s=run_s, low_s=run_s - 1, high_s=run_s + 1))

    def timed(run_s: float) -> RunRecord:
        return with_times(predicted_run, wide(run_s), step(0.5, Phase.DECODE, exposed_s=0.1))

    near, far = told(timed(5.0), timed(4.0)), told(timed(9.0), timed(4.0))
    assert "Their intervals overlap (8.5 s to 10.5 s in A, 7.5 s to 9.5 s in B)" in near[-1]
    assert "overlap" not in far[-1]


def test_times_on_one_side_decide_nothing(predicted_run: RunRecord) -> None:
    timed = with_times(predicted_run, step(5.0), step(0.5, Phase.DECODE))
    assert told(timed, predicted_run)[-1] == (
        "Which one is faster is not known: nothing timed or modelled a step of B."
    )


def test_equal_times_are_called_the_same(predicted_run: RunRecord) -> None:
    timed = with_times(predicted_run, step(5.0), step(0.5, Phase.DECODE))
    assert told(timed, timed)[-1].startswith("Both take the same time for a request")


def test_kinds_that_changed_are_told_together(predicted_run: RunRecord) -> None:
    rows = tuple(
        replace(row, kind=Kind.REDUCE_SCATTER) if row.kind is Kind.ALL_REDUCE else row
        for row in predicted_run.rows
    )
    text = "\n".join(told(predicted_run, replace(predicted_run, rows=rows)))
    assert "for attn over tp B has 3 reduce-scatters where A has 3 all-reduces" in text
    assert "for embed over tp B has 1 reduce-scatter where A has 1 all-reduce" in text


def test_bytes_are_those_of_the_rows(predicted_run: RunRecord) -> None:
    fewer = replace(predicted_run, rows=predicted_run.rows[4:])
    assert told(predicted_run, fewer)[0].startswith(
        "prefill: B sends 12.3 kB less in a step (-67%), "
    )


def test_the_document_has_the_same_figures(predicted_run: RunRecord) -> None:
    timed = with_times(predicted_run, step(5.0), step(0.5, Phase.DECODE, exposed_s=0.1))
    document = json.loads(json.dumps(explanation_document(two(timed, timed))))
    assert document["request_s"] == {"left": 9.5, "right": 9.5}
    prefill = document["phases"]["prefill"]
    assert prefill["time"]["left"]["exposed_by_axis_s"] == {"tp": 1.0}
    assert prefill["time"]["step_s_change"] == 0
    wire = sum(place["left"]["wire_bytes"] for place in prefill["places"])
    rows = [row for row in timed.rows if row.phase is Phase.PREFILL]
    assert wire == pytest.approx(float(sum(row.count * row.wire_bytes for row in rows)))


def test_hostile_names_do_not_reach_the_terminal(predicted_run: RunRecord) -> None:
    hostile = tuple(replace(row, axis="\x1b[31m<script>") for row in predicted_run.rows)
    text = "\n".join(told(predicted_run, replace(predicted_run, rows=hostile)))
    assert "\x1b" not in text
