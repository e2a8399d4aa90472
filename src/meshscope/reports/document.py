"""The JSON documents of a run and of a comparison: the figures of the text, with the table's names.

`totals` has figures of one step of a phase on one device, and `request` of all its steps.
`verdict` says whether the prediction and the strongest source agree in their collectives and, apart
from that, in their times; it is null without both.
`time` holds the means of the timed requests of a live run, and `latency` their distribution. Otherwise
`time` is modeled, with its basis, and `latency` is absent. All fields of `time` are null if no step
has a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from fractions import Fraction
from typing import Any

from meshscope.analysis.comparison import compare_all_sources, n_promoted_collectives
from meshscope.analysis.join import Comparison, Match, Verdict, left_rows, right_rows
from meshscope.analysis.request import Throughput, request_latency, step_spreads
from meshscope.analysis.totals import (
    Total,
    grouped,
    request_total,
    request_totals,
    step_total,
    step_totals,
    unattributed,
)
from meshscope.cost.memory import Capacity
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.plans.memory import Memory
from meshscope.reports.answer import (
    SourceAgreement,
    SourceAnswer,
    agreements_of,
    answer_of,
    fit_of,
    source_answer,
)
from meshscope.reports.speculation import speculation_document
from meshscope.reports.times import bounds_document, time_document
from meshscope.reports.words import verdict_sentence
from meshscope.serialize import picked, to_plain
from meshscope.store.run import RunRecord

TIMES = ("prefill_s", "decode_step_s", "step_s", "ttft_s", "tpot_s", "e2e_s", "basis")
UNKNOWN_PHASE = "unknown"


def run_document(run: RunRecord, *, has_suggestions: bool = True) -> dict[str, Any]:
    """The document of `--json` for a run: its figures, and what to change, which can be left out."""
    answer, source = answer_of(run, has_suggestions=has_suggestions), run.manifest.source
    memory = run.memory.get(source)
    figures = next((one for one in answer.sources if one.source is source), None)
    rows = run.rows_of(source)
    step, request = _totals(step_totals(rows), run), _totals(request_totals(rows), run)
    no_memory = dict.fromkeys(f.name for f in fields(Memory))
    return {
        "run": None if run.path is None else str(run.path),
        "source": source.value,
        "experiment": run.manifest.experiment.as_dict(),
        "collectives": [{**_row(g.row), "layers": list(g.layers)} for g in grouped(rows)],
        "totals": {phase: {**total, "request": request[phase]} for phase, total in step.items()},
        "memory": no_memory if memory is None else asdict(memory),
        "time": time_document(run, source) or dict.fromkeys(TIMES),
        "unattributed": _unattributed(rows),
        "other_operations": other_operations_document(run),
        "verdict": _source_verdict(answer.agreements),
        "throughput": throughput_document(figures or source_answer(run, source)),
        "fit": fit_document(memory, answer.capacity),
        "capacity": None if answer.capacity is None else asdict(answer.capacity),
        "notes": list(answer.notes),
        "why": {phase.value: sentence for phase, sentence in answer.why.items()},
        **bounds_document(run, source),
        **_live(run),
        **speculation_document(run),
        **({} if answer.served is None else {"served": asdict(answer.served)}),
        **({"suggestions": list(map(asdict, answer.suggestions))} if has_suggestions else {}),
    }


def _live(run: RunRecord) -> dict[str, Any]:
    measured = run.measured
    if measured is not None and run.is_trace:
        return {"measured": asdict(measured)}
    latency, steps = request_latency(run), step_spreads(run)
    if measured is None or (latency is None and not steps):
        return {}
    of_phases = {phase.value: asdict(spread) for phase, spread in steps.items()}
    return {
        "latency": of_phases if latency is None else asdict(latency),
        "measured": asdict(measured),
        "n_promoted_to_f32": n_promoted_collectives(run),
    }


def metrics_document(run: RunRecord) -> dict[str, Any]:
    """Totals, unattributed collectives and the verdict, by source: the content of metrics.json."""
    rows = {source.value: run.rows_of(source) for source in run.sources}
    return {
        "step_totals": {name: _totals(step_totals(of), run) for name, of in rows.items()},
        "request_totals": {name: _totals(request_totals(of), run) for name, of in rows.items()},
        "unattributed": {name: _unattributed(of) for name, of in rows.items()},
        "verdict": _source_verdict(agreements_of(run)),
    }


def other_operations_document(run: RunRecord) -> list[dict[str, Any]]:
    """What may communicate, and host transfers."""
    return [{**to_plain(other), "text": str(other)} for other in run.manifest.other_operations]


def comparison_document(
    comparison: Comparison, *, left: Mapping[str, Any], right: Mapping[str, Any]
) -> dict[str, Any]:
    """The document of `compare --json`; `left` and `right` hold facts on the sides.

    A row's `count` is its executions in one step over all its `layers`; the collectives inside the row
    have no layer and count 1. `differences` sums each verdict of each phase, in one step and in the
    request.
    """
    return {
        "left": dict(left),
        "right": dict(right),
        "verdict": comparison.agreement.value,
        "summary": verdict_sentence(comparison, left=left["name"], right=right["name"]),
        "rows": [
            {
                "verdict": match.verdict.value,
                "note": match.note,
                "layers": list(match.layers),
                "count": match.count,
                "left": None if match.left is None else _row(match.left),
                "right": None if match.right is None else _row(match.right),
            }
            for match in comparison.matches
        ],
        "differences": {
            _phase_key(phase): {
                verdict.value: _difference(matches)
                for verdict in Verdict
                if (matches := comparison.with_verdict(verdict, phase))
                and verdict is not Verdict.EQUAL
            }
            for phase in comparison.phases
        },
    }


def own_verdicts_document(run: RunRecord) -> dict[str, Any]:
    """The verdicts on the sources of one run.

    `verdicts` judges the collectives of each pair, keyed by `left = right`; `agreements` judges the
    collectives and times of each source against the strongest one, keyed by that source.
    """
    comparisons = compare_all_sources(run)
    return {
        "verdicts": {f"{a} = {b}": c.agreement.value for (a, b), c in comparisons.items()},
        "agreements": {a.left.value: agreement_document(a) for a in agreements_of(run)},
    }


def _source_verdict(agreements: Sequence[SourceAgreement]) -> dict[str, Any] | None:
    is_predicted = bool(agreements) and agreements[0].left is Source.PREDICTED
    return agreement_document(agreements[0]) if is_predicted else None


def _difference(matches: list[Match]) -> dict[str, Any]:
    sides = {"left": left_rows(matches), "right": right_rows(matches)}
    return {
        "count": sum(match.count for match in matches),
        "step": {side: _total(step_total(rows)) for side, rows in sides.items()},
        "request": {side: _total(request_total(rows)) for side, rows in sides.items()},
    }


def _total(total: Total) -> dict[str, Any]:
    if not total.is_sized:
        return {"count": total.count, "payload_bytes": None, "wire_bytes": None}
    unsized = {"n_unsized": total.n_unsized} if total.n_unsized else {}
    known = picked(total, "count", "payload_bytes") | {"wire_bytes": _number(total.wire_bytes)}
    return known | unsized


def _row(row: Collective) -> dict[str, Any]:
    """A value for every column of the event table; a collective of all devices has no device."""
    values = picked(row, *Collective.__slots__, "n_groups")
    wire_bytes = None if row.wire_bytes is None else _number(row.wire_bytes)
    return {**values, "wire_bytes": wire_bytes, "device": None}


def _number(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)


def _totals(totals: Mapping[Phase | None, Total], run: RunRecord) -> dict[str, Any]:
    """Totals by phase; a phase of the experiment without collectives has zeros."""
    zero = {"count": 0, "payload_bytes": 0, "wire_bytes": 0}
    return {_phase_key(phase): zero for phase in run.manifest.phases} | {
        _phase_key(phase): _total(total) for phase, total in totals.items()
    }


def _phase_key(phase: Phase | None) -> str:
    return UNKNOWN_PHASE if phase is None else phase.value


def _unattributed(rows: Iterable[Collective]) -> dict[str, Any]:
    summary = unattributed(rows)
    return asdict(summary) | {"reasons": dict(summary.reasons)}


def throughput_document(figures: SourceAnswer) -> dict[str, float | None]:
    """The rates of the slice by one source; null where a time is unknown."""
    return {field.name: getattr(figures, field.name).value for field in fields(Throughput)}


def fit_document(memory: Memory | None, capacity: Capacity | None) -> dict[str, Any] | None:
    """Whether a run with this memory fits a device; None without an account of its memory."""
    if memory is None:
        return None
    fit = fit_of(memory, capacity)
    return {
        "fits": memory.fit.value,
        "reason": memory.fit_reason,
        "known_bytes": fit.known_bytes,
        "low_bytes": memory.total_low_bytes,
        "high_bytes": memory.total_high_bytes,
        "is_total": memory.total_bytes is not None,
        "hbm_bytes": memory.hbm_bytes,
        "largest_batch": capacity and capacity.largest_batch,
        "largest_context": capacity and capacity.largest_context,
        "text": fit.text,
    }


def agreement_document(agreement: SourceAgreement) -> dict[str, Any]:
    """The verdicts on the collectives and on the times of two sources."""
    return {
        "verdict": agreement.agreement.value,
        "summary": agreement.collectives,
        "is_time_within": agreement.is_time_within,
        "time_summary": "; ".join(agreement.time_sentences) or None,
        "times": [
            {
                "phase": time.phase.value,
                "left": to_plain(time.left),
                "right": to_plain(time.right),
                **picked(time, "ratio", "is_within"),
                "parts": list(map(asdict, time.parts)),
                "activities": list(map(asdict, time.activities)),
            }
            for time in agreement.times
        ],
    }
