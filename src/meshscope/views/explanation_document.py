"""The JSON document that explains why one side costs more: sentences and figures."""

from dataclasses import asdict
from typing import Any

from meshscope.analysis.explanation import (
    Explanation,
    PhaseChange,
    PlaceChange,
    PlaceTraffic,
    StepBreakdown,
)
from meshscope.serialize import to_plain
from meshscope.views.explanation import sentences


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """The sentences, the differing settings, and the bytes and seconds of each phase."""
    left_s, right_s = (explanation.request_s(side) for side in (0, 1))
    return {
        "sentences": sentences(explanation),
        "asked": [asdict(difference) for difference in explanation.differences],
        "request_s": {"left": left_s, "right": right_s},
        "phases": {
            "unknown" if change.phase is None else change.phase.value: {
                "is_in": {
                    "left": explanation.left.has_phase(change.phase),
                    "right": explanation.right.has_phase(change.phase),
                },
                "places": [_place_document(place) for place in change.places],
                "time": _time_document(change),
            }
            for change in explanation.changes
        },
    }


def _place_document(place: PlaceChange) -> dict[str, Any]:
    return {
        "axis": place.axis,
        "part": place.part,
        "left": _traffic_document(place.left),
        "right": _traffic_document(place.right),
        "wire_bytes_change": float(place.wire_change),
    }


def _traffic_document(traffic: PlaceTraffic) -> dict[str, Any]:
    wire_bytes, kinds = float(traffic.wire_bytes), dict(traffic.kinds)
    return {**asdict(traffic), "wire_bytes": wire_bytes, "kinds": kinds}


def _time_document(change: PhaseChange) -> dict[str, Any] | None:
    """The seconds of a step on both sides; null if one is unknown."""
    if change.left_cost is None or change.right_cost is None:
        return None
    return {
        "step_s_change": change.step_change_s,
        "left": _cost_document(change.left_cost),
        "right": _cost_document(change.right_cost),
    }


def _cost_document(cost: StepBreakdown) -> dict[str, Any]:
    values = to_plain(cost)
    parts = values.pop("by_part_s")
    return {
        **values,
        "by_part": {n: {"compute_s": c, "exposed_s": e} for n, (c, e) in parts.items()},
    }
