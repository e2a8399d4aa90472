"""Whether the step times of two sources of a run agree within their intervals, and where they differ most."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.analysis.request import RequestTime, request_times
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.store.run import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """Seconds of compute and exposed communication of one part of a step, by two sources."""

    part: str
    left_s: float
    right_s: float

    @property
    def change_s(self) -> float:
        """Seconds by which the right source exceeds the left one."""
        return self.right_s - self.left_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAgreement:
    """The time of one step by two sources; `changes` are those of its parts, the largest first.

    `changes` is empty unless both sources model the parts. Work that belongs to no part is the part
    `BETWEEN_PARTS`.
    """

    phase: Phase
    left: TimeEstimate
    right: TimeEstimate
    changes: tuple[PartChange, ...] = ()

    @property
    def is_within(self) -> bool:
        """Whether the intervals overlap; a time without an interval is a point."""
        return self.left.lower_s <= self.right.upper_s and self.right.lower_s <= self.left.upper_s

    @property
    def ratio(self) -> float:
        """The right time over the left time."""
        return self.right.value_s / self.left.value_s if self.left.value_s else float("inf")


def time_agreements(run: RunRecord, left: Source, right: Source) -> tuple[TimeAgreement, ...]:
    """One for each phase whose step has a time by both sources."""
    requests = request_times(run)
    sides = [_steps(requests.get(source)) for source in (left, right)]
    parts = [{time.phase: _by_part(time) for time in run.times_of(s)} for s in (left, right)]
    return tuple(
        TimeAgreement(
            phase=phase,
            left=sides[0][phase],
            right=sides[1][phase],
            changes=_changes(parts[0].get(phase, {}), parts[1].get(phase, {})),
        )
        for phase in Phase
        if phase in sides[0] and phase in sides[1]
    )


def _steps(request: RequestTime | None) -> dict[Phase, TimeEstimate]:
    if request is None:
        return {}
    steps = {Phase.PREFILL: request.ttft, Phase.DECODE: request.decode_step}
    return {phase: step for phase, step in steps.items() if step is not None}


def _by_part(time: StepTime) -> dict[str, float]:
    return {part.part or BETWEEN_PARTS: part.compute_s + part.exposed_s for part in time.parts}


def _changes(left: Mapping[str, float], right: Mapping[str, float]) -> tuple[PartChange, ...]:
    if not left or not right:
        return ()
    changes = (
        PartChange(part=part, left_s=left.get(part, 0.0), right_s=right.get(part, 0.0))
        for part in dict.fromkeys((*left, *right))
    )
    return tuple(sorted(changes, key=lambda change: -abs(change.change_s)))
