"""The answer of a run in JSON: throughput, fit, what binds each step, and the verdict on its times."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from meshscope.analysis.agreement import TimeAgreement
from meshscope.analysis.request import Throughput, request_times, throughput_of
from meshscope.events.enums import Source
from meshscope.planner.capacity import capacity_of_run
from meshscope.serialize import to_plain
from meshscope.store.run import RunRecord
from meshscope.views.answer import Fit, SourceAgreement, fit_of


def throughput_document(run: RunRecord, source: Source) -> dict[str, float | None]:
    """The rates of the slice by one source; null where a time is unknown."""
    request = request_times(run).get(source)
    rates = None if request is None else throughput_of(request, run)
    return dict.fromkeys(f.name for f in fields(Throughput)) if rates is None else asdict(rates)


def fit_document(run: RunRecord, source: Source) -> dict[str, Any] | None:
    """Whether the run fits a device by one source; None without an account of its memory."""
    memory = run.memory.get(source)
    return None if memory is None else _fit(fit_of(memory, capacity_of_run(run)))


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        "fits": fit.state.value,
        "reason": fit.reason,
        "known_bytes": fit.known.value,
        "low_bytes": fit.known.low,
        "high_bytes": fit.known.high,
        "is_total": fit.is_total,
        "hbm_bytes": fit.hbm.value,
        "largest_batch": fit.largest_batch,
        "largest_context": fit.largest_context,
        "text": fit.text,
    }


def capacity_document(run: RunRecord) -> dict[str, Any] | None:
    """The predicted capacity of the slice; None for an unknown experiment or without HBM."""
    capacity = capacity_of_run(run)
    return None if capacity is None else asdict(capacity)


def agreement_document(agreement: SourceAgreement) -> dict[str, Any]:
    """The verdict on the collectives of two sources, and that on their times."""
    return {
        "verdict": agreement.agreement.value,
        "summary": agreement.collectives,
        "is_time_within": agreement.is_time_within,
        "time_summary": "; ".join(agreement.time_sentences) or None,
        "times": times_document(agreement.times),
    }


def times_document(times: Sequence[TimeAgreement]) -> list[dict[str, Any]]:
    """The two times of each phase with their intervals, and the change of each part and activity."""
    return [
        {
            "phase": time.phase.value,
            "left": to_plain(time.left),
            "right": to_plain(time.right),
            "ratio": time.ratio,
            "is_within": time.is_within,
            "parts": [asdict(change) for change in time.parts],
            "activities": [asdict(change) for change in time.activities],
        }
        for time in times
    ]
