"""Explanations of a comparison: the figures are those of the runs, and unknowns are named."""

import json
from dataclasses import replace

import pytest
from made import estimate, of_source, part_cost, step_time, varied
from tables import table

from meshscope.analysis.comparison import Explanation, Side, explain
from meshscope.events.enums import Kind, Phase, Source
from meshscope.events.measured import Measured, Request
from meshscope.events.step_time import StepTime
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment_record import NamedModel
from meshscope.plans.plan import parse_plan
from meshscope.reports.explanation import explanation_document, sentences
from meshscope.store.run import RunRecord


def step(run_s: float, phase: Phase = Phase.PREFILL, *, exposed_s: float = 1.0) -> StepTime:
    exposed = {"collective_s": exposed_s, "exposed_s": exposed_s}
    return step_time(
        phase, estimate(run_s, run_s, run_s), run_s - exposed_s, source=Source.PREDICTED,
        exposed_by_axis_s={"tp": exposed_s},
        by_basis_s={"interconnect_model": exposed_s, "roofline": run_s - exposed_s},
        parts=(part_cost("mlp", run_s - exposed_s, **exposed),), **exposed,
    )  # fmt: skip


def with_times(
    run: RunRecord, prefill: StepTime | float, decode_s: float = 0.5, **exposed: float
) -> RunRecord:
    prefill = step(prefill) if isinstance(prefill, float) else prefill
    return replace(run, times=(prefill, step(decode_s, Phase.DECODE, **exposed)))


def explained(left: RunRecord, right: RunRecord) -> Explanation:
    return explain(
        Side(name="A", run=left, source=left.manifest.source),
        Side(name="B", run=right, source=right.manifest.source),
    )


def lines(left: RunRecord, right: RunRecord) -> list[str]:
    return sentences(explained(left, right))


def test_the_reason_names_axis_and_part(predicted_run: RunRecord) -> None:
    slow = with_times(predicted_run, 5.0, exposed_s=0.1)
    fast = with_times(predicted_run, step(3.0, exposed_s=0.5), exposed_s=0.1)
    text = lines(slow, fast)
    assert (
        "prefill: B takes 3 s per step and A 5 s: -2 s (-40%); compute -1.5 s, exposed communication "
        "over tp -500 ms, mostly in mlp (-2 s) (basis roofline+interconnect_model)."
    ) in text
    assert text[0] == (
        "B is faster than A: B takes 7.5 s per request and A 9.5 s: -2 s (-21%); prefill -2 s, "
        "decode 0 us."
    )


def test_the_largest_part_is_most_of_the_change_only_above_half(predicted_run: RunRecord) -> None:
    def parts(**seconds: float) -> RunRecord:
        costs = tuple(part_cost(n, s) for n, s in seconds.items())
        made = replace(step(sum(seconds.values()), exposed_s=0.0), parts=costs)
        return with_times(predicted_run, made)

    even = lines(parts(attn=2.0, mlp=2.0, embed=1.0), parts(attn=3.0, mlp=3.0, embed=2.0))
    against = lines(parts(attn=2.0, mlp=2.0, embed=1.0), parts(attn=5.0, mlp=0.5, embed=0.5))
    most = lines(parts(attn=2.0, mlp=2.0), parts(attn=2.1, mlp=4.0))
    assert any("largest change in attn (+1 s)" in text for text in even)
    assert any("mostly in attn (+3 s)" in text for text in against)
    assert any("mostly in mlp (+2 s)" in text for text in most)


def test_equal_steps_list_only_parts_that_change(predicted_run: RunRecord) -> None:
    def split(attn_s: float) -> RunRecord:
        halves = (("attn", attn_s), ("mlp", 4.0 - attn_s))
        costs = tuple(part_cost(n, s) for n, s in halves)
        made = replace(step(4.0, exposed_s=0.0), parts=costs)
        return with_times(predicted_run, made)

    same = "prefill: the step time is the same within 0.5%, 4 s in B and 4 s in A (basis "
    assert any(text.startswith(same) for text in lines(split(1.0), split(1.0)))
    moved = next(text for text in lines(split(1.0), split(3.0)) if "is the same within" in text)
    assert "in A; attn +2 s, mlp -2 s (basis " in moved


def test_an_unknown_breakdown_of_a_measured_step_is_not_zero(predicted_run) -> None:
    timed = with_times(predicted_run, 5.0)
    measured = Measured(
        requests=(Request(prefill_s=2.0, decode_s=(0.1,)),),
        n_profiled_steps={}, loads=(), times=(), findings=(), costs=(),
    )  # fmt: skip
    live = replace(of_source(predicted_run, Source.MEASURED), measured=measured)
    text = lines(live, timed)
    assert (
        "A is measured and B is predicted: the comparison mixes measured and modeled times." in text
    )
    seconds = next(one for one in text if one.startswith("prefill: B takes"))
    assert seconds == (
        "prefill: B takes 5 s per step and A 2 s: +3 s (+150%) "
        "(basis of A measured, of B roofline+interconnect_model)."
    )


def test_different_settings_follow_the_faster_side(predicted_run: RunRecord) -> None:
    ours = predicted_run.manifest.experiment
    changes = {"plan": parse_plan("tp=8,sp"), "topology": parse_topology("v5p:2x2x2")}
    other = varied(predicted_run, experiment=changes)
    assert lines(predicted_run, other)[1] == (
        f"Different settings: slice {ours.topology.name} (A) and v5p:2x2x2 (B); "
        f"plan {ours.plan} (A) and tp=8,sp (B)."
    )
    fewer = varied(predicted_run, experiment={"model": NamedModel(name="tiny", n_layers=1)})
    expected = "A and B do different work: they differ in layers."
    assert lines(predicted_run, fewer)[2] == expected


def test_unknown_settings_of_an_imported_run_are_no_difference(predicted_run: RunRecord) -> None:
    imported = varied(predicted_run, experiment={"model": None})
    assert lines(predicted_run, imported)[1] == "Unknown for B: model and layers."
    assert "different work" not in "\n".join(lines(predicted_run, imported))


def test_only_versions_that_both_sides_know_can_differ(predicted_run: RunRecord) -> None:
    newer = lines(
        varied(predicted_run, manifest={"versions": {"jax": "0.10.2"}}),
        varied(predicted_run, manifest={"versions": {"jax": "0.12.0.1", "torch_xla": "2.9.0"}}),
    )
    assert newer[1] == "Different settings: jax 0.10.2 (A) and 0.12.0.1 (B)."
    assert not any("torch_xla" in text for text in newer)


def test_a_rounding_error_is_no_change(predicted_run: RunRecord) -> None:
    slow = with_times(predicted_run, 5.0)
    fast = with_times(predicted_run, step(3.0, exposed_s=1.0 - 1e-15))
    text = next(one for one in lines(slow, fast) if one.startswith("prefill: B takes"))
    assert "compute -2 s" in text
    assert "exposed" not in text


def test_a_phase_of_only_one_side_is_reported(predicted_run: RunRecord) -> None:
    rows = tuple(row for row in predicted_run.rows if row.phase is Phase.PREFILL)
    first = varied(predicted_run, manifest={"phases": (Phase.PREFILL,)}, rows=rows)
    text = lines(first, predicted_run)
    alone = next(one for one in text if one.startswith("decode"))
    assert alone.startswith("decode: only B has this phase: ")
    assert "The faster side is unknown: the two sides have different phases." in text


@table
def test_a_percentage_is_neither_0_nor_100(predicted_run, ours, theirs, words) -> None:
    left, right = (with_times(predicted_run, step(s, exposed_s=0.0)) for s in (ours, theirs))
    text = next(one for one in lines(left, right) if one.startswith("prefill: B takes"))
    assert f"({words})" in text


def test_requests_of_unknown_activities_are_equal_while_their_intervals_overlap(predicted_run):
    def timed(run_s: float) -> RunRecord:
        wide = replace(step(run_s), step=estimate(run_s, run_s - 1, run_s + 1))
        return with_times(predicted_run, wide, exposed_s=0.1)

    near, far = lines(timed(5.0), timed(4.0)), lines(timed(9.0), timed(4.0))
    assert near[0].startswith(
        "A and B are equal within the errors that they do not share: B takes 8.5 s"
    )
    assert far[0].startswith("B is faster than A: ")


def test_the_faster_side_is_unknown_if_one_side_has_no_times(predicted_run: RunRecord) -> None:
    timed = with_times(predicted_run, 5.0)
    assert lines(timed, predicted_run)[0] == (
        "The faster side is unknown: no step of B is timed or modeled."
    )


def test_equal_times_are_reported_as_equal(predicted_run: RunRecord) -> None:
    timed = with_times(predicted_run, 5.0)
    assert lines(timed, timed)[0].startswith("A request takes the same time within 0.5%: ")


def test_parts_with_the_same_changed_kinds_share_a_clause(predicted_run: RunRecord) -> None:
    rows = tuple(
        replace(row, kind=Kind.REDUCE_SCATTER) if row.kind is Kind.ALL_REDUCE else row
        for row in predicted_run.rows
    )
    text = "\n".join(lines(predicted_run, replace(predicted_run, rows=rows)))
    assert "attn over tp: 3 reduce-scatters in B, 3 all-reduces in A" in text
    assert "embed over tp: 1 reduce-scatter in B, 1 all-reduce in A" in text


def test_bytes_are_summed_from_the_rows(predicted_run: RunRecord) -> None:
    fewer = replace(predicted_run, rows=predicted_run.rows[4:])
    assert lines(predicted_run, fewer)[1].startswith(
        "prefill: B sends 12.3 kB less per step (-67%), "
    )


def test_the_document_has_the_same_figures(predicted_run: RunRecord) -> None:
    timed = with_times(predicted_run, 5.0, exposed_s=0.1)
    document = json.loads(json.dumps(explanation_document(explained(timed, timed))))
    assert document["request_s"] == {"left": 9.5, "right": 9.5}
    prefill = document["phases"]["prefill"]
    assert prefill["time"]["left"]["exposed_by_axis_s"] == {"tp": 1.0}
    assert prefill["time"]["step_s_change"] == 0
    wire = sum(place["left"]["wire_bytes"] for place in prefill["places"])
    rows = [row for row in timed.rows if row.phase is Phase.PREFILL]
    assert wire == pytest.approx(float(sum(row.count * row.wire_bytes for row in rows)))
