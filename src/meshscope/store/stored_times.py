"""Step times as metrics.json holds them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeEstimate, UnestimatedWork


def time_as_dict(time: StepTime) -> dict[str, Any]:
    """Plain values by field name; an estimate is {"s", "low_s", "high_s"}."""
    values = asdict(time)
    values["step"] = _estimate_as_dict(time.step)
    for stored, work in zip(values["unestimated"], time.unestimated, strict=True):
        stored["seconds"] = _estimate_as_dict(work.seconds)
    return values


def time_from_dict(stored: Mapping[str, Any]) -> StepTime:
    """The step time that `time_as_dict` wrote."""
    typed: dict[str, Any] = {
        "source": Source(stored["source"]),
        "phase": Phase(stored["phase"]),
        "step": _estimate(stored["step"]),
        "parts": tuple(PartCost(**part) for part in stored["parts"]),
        "unestimated": tuple(map(_unestimated, stored["unestimated"])),
        "notes": tuple(stored["notes"]),
    }
    return StepTime(**{**stored, **typed})


def _unestimated(stored: Mapping[str, Any]) -> UnestimatedWork:
    typed: dict[str, Any] = {"seconds": _estimate(stored["seconds"])}
    return UnestimatedWork(**{**stored, **typed})


def _estimate_as_dict(estimate: TimeEstimate) -> dict[str, float | None]:
    return {"s": estimate.value_s, "low_s": estimate.low_s, "high_s": estimate.high_s}


def _estimate(stored: Mapping[str, Any]) -> TimeEstimate:
    return TimeEstimate(value_s=stored["s"], low_s=stored["low_s"], high_s=stored["high_s"])
