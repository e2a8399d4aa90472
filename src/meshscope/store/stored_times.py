"""Step times as metrics.json holds them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeEstimate, UnestimatedWork


def time_as_dict(time: StepTime) -> dict[str, Any]:
    """Plain values, by the names of the fields."""
    return asdict(time)


def time_from_dict(stored: Mapping[str, Any]) -> StepTime:
    """The step time that `time_as_dict` wrote."""
    typed: dict[str, Any] = {
        "source": Source(stored["source"]),
        "phase": Phase(stored["phase"]),
        "step": TimeEstimate(**stored["step"]),
        "parts": tuple(PartCost(**part) for part in stored["parts"]),
        "unestimated": tuple(map(_unestimated, stored["unestimated"])),
        "notes": tuple(stored["notes"]),
    }
    return StepTime(**{**stored, **typed})


def _unestimated(stored: Mapping[str, Any]) -> UnestimatedWork:
    typed: dict[str, Any] = {"seconds": TimeEstimate(**stored["seconds"])}
    return UnestimatedWork(**{**stored, **typed})
