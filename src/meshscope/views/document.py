"""What --json prints and metrics.json holds: the same figures as the text, by the table's names.

`totals` are those of one step of a phase on one device, and under `request` those of all its
steps. `verdict` tells whether prediction and compiled program agree; null where only one is there.
`time` holds means over the timed requests of a run on live devices, and `latency` their spread;
without such a run it is what the model of time says, with its basis, and there is no `latency`.
Where there is no model (a chip without published peaks), every field is null.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from fractions import Fraction
from typing import Any

from meshscope.analysis.grouping import Group, grouped
from meshscope.analysis.join import Comparison, Match, Verdict, compare, left_rows, right_rows
from meshscope.analysis.latency import Latency, latency_of
from meshscope.analysis.promotion import promotion_of
from meshscope.analysis.totals import Total, request_totals, step_totals
from meshscope.analysis.unattributed import unattributed
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.spec.hardware.chips import Chip, ChipKind
from meshscope.spec.plan.memory import Memory
from meshscope.store.run import RunRecord
from meshscope.views.roofs import roofline_document
from meshscope.views.times import time_document
from meshscope.views.words import one_total, verdict_words

# Columns of the event table that a row of all devices does not have.
UNKNOWN_COLUMNS = ("device",)
TIMES = ("prefill_s", "decode_step_s", "ttft_s", "tpot_s", "e2e_s", "basis")
UNKNOWN_PHASE = "unknown"


def run_document(run: RunRecord) -> dict[str, Any]:
    """The one document of `--json` for a run: its strongest source, rows grouped over layers."""
    source = run.manifest.source
    rows = run.rows_of(source)
    return {
        "run": None if run.path is None else str(run.path),
        "source": source.value,
        "experiment": run.manifest.experiment.as_dict(),
        "collectives": [_group(group) for group in grouped(rows)],
        "totals": _totals_of_step_and_request(run, rows),
        "memory": _memory(run.memory.get(source)),
        "time": _time(run),
        "unattributed": _unattributed(rows),
        "verdict": _own_verdict(run),
        **roofline_document(run, source, run_chip(run)),
        **_live(run),
    }


def _time(run: RunRecord) -> dict[str, Any]:
    """Mean seconds of the timed requests, else what was modelled; null in every field without either."""
    latency = run_latency(run)
    if latency is None:
        return time_document(run, run.manifest.source) or dict.fromkeys(TIMES)
    return {
        "prefill_s": latency.ttft.mean_s,
        "decode_step_s": None if latency.itl is None else latency.itl.mean_s,
        "ttft_s": latency.ttft.mean_s,
        "tpot_s": None if latency.tpot is None else latency.tpot.mean_s,
        "e2e_s": latency.e2e.mean_s,
        "basis": Source.MEASURED.value,
    }


def run_latency(run: RunRecord) -> Latency | None:
    """The latency of the run's timed requests; None where nothing was timed."""
    workload = run.manifest.experiment.workload
    if run.measured is None or workload is None:
        return None
    requests = run.measured.requests
    return latency_of(requests, batch=workload.batch, prompt=workload.prompt)


def _live(run: RunRecord) -> dict[str, Any]:
    """What only live devices tell."""
    latency = run_latency(run)
    if latency is None or run.measured is None:
        return {}
    return {
        "latency": asdict(latency),
        "measured": asdict(run.measured),
        "n_promoted_to_f32": run_promotion(run),
    }


def _totals_of_step_and_request(run: RunRecord, rows: Iterable[Collective]) -> dict[str, Any]:
    """The figures of one step of each phase, and under `request` those of all its steps."""
    rows = list(rows)
    step, request = (_totals(totals(rows), run) for totals in (step_totals, request_totals))
    return {phase: {**figures, "request": request[phase]} for phase, figures in step.items()}


def metrics_document(run: RunRecord) -> dict[str, Any]:
    """Figures derived from the rows of every source, for metrics.json."""
    return {
        "step_totals": {s.value: _totals(step_totals(run.rows_of(s)), run) for s in run.sources},
        "request_totals": {
            s.value: _totals(request_totals(run.rows_of(s)), run) for s in run.sources
        },
        "unattributed": {s.value: _unattributed(run.rows_of(s)) for s in run.sources},
        "verdict": _own_verdict(run),
    }


def own_comparison(run: RunRecord, source: Source | None = None) -> Comparison | None:
    """Predicted against `source`, by default the run's strongest; None when the run has only one."""
    source = source or run.manifest.source
    if source is Source.PREDICTED or not {Source.PREDICTED, source} <= set(run.sources):
        return None
    return compared((run, Source.PREDICTED), (run, source))


def compared(left: tuple[RunRecord, Source], right: tuple[RunRecord, Source]) -> Comparison:
    """Two sources of one run or of two; what a CPU carries out in float32 is compared so."""
    asked, found = (run.rows_of(source) for run, source in (left, right))
    if is_on_cpu(right[0]) and right[1] is not Source.PREDICTED:
        asked = promotion_of(asked, found).rows
    return compare(asked, found)


def run_promotion(run: RunRecord) -> int:
    """How many collectives of a step the CPU backend carries out in float32, though 16-bit were asked."""
    if not is_on_cpu(run):
        return 0
    return promotion_of(run.rows_of(Source.PREDICTED), run.rows_of(Source.COMPILED)).count


def is_on_cpu(run: RunRecord) -> bool:
    """Whether the run's devices are virtual ones on a CPU."""
    chip = run_chip(run)
    return chip is not None and chip.kind is ChipKind.CPU


def run_chip(run: RunRecord) -> Chip | None:
    """The chip that the run is for; None where its topology is not known."""
    return run.manifest.experiment.chip


def comparison_document(
    comparison: Comparison, *, left: Mapping[str, Any], right: Mapping[str, Any]
) -> dict[str, Any]:
    """The document of `compare --json`; `left` and `right` say run, source and name of the sides.

    A row's `count` is the times in one step over all its `layers`; the rows inside have no layer
    and count 1. `differences` adds up per phase and verdict, in one step and in the whole request.
    """
    return {
        "left": dict(left),
        "right": dict(right),
        "verdict": _verdict_word(comparison),
        "summary": verdict_words(comparison, left=left["name"], right=right["name"]),
        "rows": [_match(match) for match in comparison.matches],
        "differences": {
            _phase_key(phase): _phase_differences(comparison, phase) for phase in comparison.phases
        },
    }


def own_verdicts_document(run: RunRecord) -> dict[str, str]:
    """The verdict on each pair of sources of one run, by `left = right`."""
    sources = run.sources
    pairs = [(a, b) for i, a in enumerate(sources) for b in sources[i + 1 :]]
    return {f"{a} = {b}": _verdict_word(compared((run, a), (run, b))) for a, b in pairs}


def _verdict_word(comparison: Comparison) -> str:
    if comparison.is_exact:
        return "equal"
    return "same meaning" if comparison.is_same_meaning else "different"


def _own_verdict(run: RunRecord) -> dict[str, str] | None:
    comparison = own_comparison(run)
    if comparison is None:
        return None
    right = run.manifest.source.value
    summary = verdict_words(comparison, left=Source.PREDICTED.value, right=right)
    return {"verdict": _verdict_word(comparison), "summary": summary}


def _phase_differences(comparison: Comparison, phase: Phase | None) -> dict[str, Any]:
    found = {v: comparison.with_verdict(v, phase) for v in Verdict if v is not Verdict.EQUAL}
    return {verdict.value: _difference(matches) for verdict, matches in found.items() if matches}


def _difference(matches: list[Match]) -> dict[str, Any]:
    left, right = left_rows(matches), right_rows(matches)
    return {
        "count": sum(match.count for match in matches),
        "step": _sides(one_total(step_totals(left)), one_total(step_totals(right))),
        "request": _sides(one_total(request_totals(left)), one_total(request_totals(right))),
    }


def _sides(left: Total, right: Total) -> dict[str, Any]:
    return {"left": _total(left), "right": _total(right)}


def _total(total: Total) -> dict[str, Any]:
    return {
        "count": total.count,
        "payload_bytes": total.payload_bytes,
        "wire_bytes": _number(total.wire_bytes),
    }


def _match(match: Match) -> dict[str, Any]:
    return {
        "verdict": match.verdict.value,
        "note": match.note,
        "layers": list(match.layers),
        "count": match.count,
        "left": None if match.left is None else _row(match.left),
        "right": None if match.right is None else _row(match.right),
    }


def _group(group: Group) -> dict[str, Any]:
    return {**_row(group.row), "layers": list(group.layers)}


def _row(row: Collective) -> dict[str, Any]:
    """All columns of the event table."""
    values = {name: getattr(row, name) for name in Collective.__slots__}
    values["n_groups"] = row.n_groups
    values["wire_bytes"] = None if row.wire_bytes is None else _number(row.wire_bytes)
    return {**values, **dict.fromkeys(UNKNOWN_COLUMNS)}


def _number(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)


def _totals(totals: Mapping[Phase | None, Total], run: RunRecord) -> dict[str, Any]:
    """By phase; phases that the experiment has stand there even when nothing communicates."""
    zero = {"count": 0, "payload_bytes": 0, "wire_bytes": 0}
    return {_phase_key(phase): zero for phase in run.manifest.phases} | {
        _phase_key(phase): _total(total) for phase, total in totals.items()
    }


def _phase_key(phase: Phase | None) -> str:
    return UNKNOWN_PHASE if phase is None else phase.value


def _memory(memory: Memory | None) -> dict[str, Any]:
    return dict.fromkeys(f.name for f in fields(Memory)) if memory is None else asdict(memory)


def _unattributed(rows: Iterable[Collective]) -> dict[str, Any]:
    found = unattributed(rows)
    return {
        "count": found.count,
        "payload_bytes": found.payload_bytes,
        "reasons": dict(found.reasons),
    }
