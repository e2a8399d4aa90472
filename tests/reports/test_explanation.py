"""Explanations of a comparison: the figures are those of the runs, and unknowns are named."""

import json
from dataclasses import replace
from typing import Any

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

SETTINGS = {
    "plan": parse_plan,
    "topology": parse_topology,
    "model": lambda facts: None if facts is None else NamedModel(**facts),
}


def step(run_s: float, phase: Phase = Phase.PREFILL, *, exposed_s: float = 1.0) -> StepTime:
    exposed = {"collective_s": exposed_s, "exposed_s": exposed_s}
    return step_time(
        phase, estimate(run_s, run_s, run_s), run_s - exposed_s, source=Source.PREDICTED,
        exposed_by_axis_s={"tp": exposed_s},
        by_basis_s={"interconnect_model": exposed_s, "roofline": run_s - exposed_s},
        parts=(part_cost("mlp", run_s - exposed_s, **exposed),), **exposed,
    )  # fmt: skip


def run_with(
    run: RunRecord,
    *,
    prefill_s: float | None = None,
    exposed_s: float = 1.0,
    decode_exposed_s: float = 1.0,
    spread_s: float = 0.0,
    parts: dict[str, float] | None = None,
    measured_s: tuple[float, float] | None = None,
    versions: dict[str, str] | None = None,
    n_dropped: int = 0,
    phase: Phase | None = None,
    all_reduce: str = Kind.ALL_REDUCE.value,
    **settings: Any,
) -> RunRecord:
    """The run with these times, settings and rows; a decode step takes 0.5 s."""
    settings = {name: SETTINGS[name](value) for name, value in settings.items()}
    facts: dict[str, Any] = {} if versions is None else {"versions": versions}
    facts |= {} if phase is None else {"phases": (Phase(phase),)}
    rows = tuple(
        replace(row, kind=Kind(all_reduce)) if row.kind is Kind.ALL_REDUCE else row
        for row in run.rows[n_dropped:]
        if phase in {None, row.phase}
    )
    run = varied(run, experiment=settings, manifest=facts, rows=rows)
    if measured_s is not None:
        measured = Measured(
            requests=(Request(prefill_s=measured_s[0], decode_s=(measured_s[1],)),),
            n_profiled_steps={}, loads=(), times=(), findings=(), costs=(),
        )  # fmt: skip
        return replace(of_source(run, Source.MEASURED), measured=measured)
    prefill_s = sum(parts.values()) if parts else prefill_s
    if prefill_s is None:
        return run
    prefill = step(prefill_s, exposed_s=0.0 if parts else exposed_s)
    prefill = replace(prefill, step=estimate(prefill_s, prefill_s - spread_s, prefill_s + spread_s))
    if parts:
        prefill = replace(prefill, parts=tuple(part_cost(n, s) for n, s in parts.items()))
    return replace(run, times=(prefill, step(0.5, Phase.DECODE, exposed_s=decode_exposed_s)))


def explained(left: RunRecord, right: RunRecord) -> Explanation:
    return explain(
        Side(name="A", run=left, source=left.manifest.source),
        Side(name="B", run=right, source=right.manifest.source),
    )


@table
def test_sentences_say_what_differs(predicted_run, left, right, says, never) -> None:
    """The sentences have these texts in this order, and not the others; a text after > begins the first."""
    lines = sentences(explained(run_with(predicted_run, **left), run_with(predicted_run, **right)))
    text = "\n".join(["", *lines, ""]).replace("\n", ">", 1)
    places = [text.find(one) for one in says]
    assert -1 not in places, text
    assert places == sorted(places)
    assert [one for one in never if one in text] == []


@table
def test_a_percentage_is_neither_0_nor_100(predicted_run, ours, theirs, words) -> None:
    left, right = (run_with(predicted_run, prefill_s=s, exposed_s=0.0) for s in (ours, theirs))
    text = next(one for one in sentences(explained(left, right)) if one.startswith("prefill: B t"))
    assert f"({words})" in text


def test_the_document_has_the_same_figures(predicted_run: RunRecord) -> None:
    timed = run_with(predicted_run, prefill_s=5.0, decode_exposed_s=0.1)
    document = json.loads(json.dumps(explanation_document(explained(timed, timed))))
    assert document["request_s"] == {"left": 9.5, "right": 9.5}
    prefill = document["phases"]["prefill"]
    assert prefill["time"]["left"]["exposed_by_axis_s"] == {"tp": 1.0}
    assert prefill["time"]["step_s_change"] == 0
    wire = sum(place["left"]["wire_bytes"] for place in prefill["places"])
    rows = [row for row in timed.rows if row.phase is Phase.PREFILL]
    assert wire == pytest.approx(float(sum(row.count * row.wire_bytes for row in rows)))
