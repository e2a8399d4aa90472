"""Whether the step times of two sources of a run agree within their intervals, and where they differ most."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.analysis.request import RequestTime, request_times
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.store.run import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChange:
    """Seconds of a share of a step, such as a part of the model or an activity, by two sources."""

    share: str
    left_s: float
    right_s: float

    @property
    def change_s(self) -> float:
        """Seconds by which the right source exceeds the left one."""
        return self.right_s - self.left_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAgreement:
    """The time of one step by two sources, and the changes of its shares, the largest first.

    `parts` have compute and exposed communication of each part of the model, with BETWEEN_PARTS for work
    that belongs to none; `activities` add up to the step. Both are () unless both sources know them.
    """

    phase: Phase
    left: TimeEstimate
    right: TimeEstimate
    parts: tuple[ShareChange, ...] = ()
    activities: tuple[ShareChange, ...] = ()

    @property
    def changes(self) -> tuple[ShareChange, ...]:
        """The changes by activity if they are known, else those by part."""
        return self.activities or self.parts

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
    modeled = [{time.phase: time for time in run.times_of(source)} for source in (left, right)]
    return tuple(
        TimeAgreement(
            phase=phase,
            left=sides[0][phase],
            right=sides[1][phase],
            parts=_changes(*(_by_part(times.get(phase)) for times in modeled)),
            activities=_changes(*(_by_activity(times.get(phase)) for times in modeled)),
        )
        for phase in Phase
        if phase in sides[0] and phase in sides[1]
    )


def _steps(request: RequestTime | None) -> dict[Phase, TimeEstimate]:
    if request is None:
        return {}
    steps = {Phase.PREFILL: request.ttft, Phase.DECODE: request.decode_step}
    return {phase: step for phase, step in steps.items() if step is not None}


def _by_part(time: StepTime | None) -> dict[str, float]:
    parts = () if time is None else time.parts
    return {part.part or BETWEEN_PARTS: part.compute_s + part.exposed_s for part in parts}


def _by_activity(time: StepTime | None) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for spent in () if time is None else time.activities:
        name = spent.activity.value + (f" over {spent.axis}" if spent.axis else "")
        seconds[name] = seconds.get(name, 0.0) + spent.seconds
    return seconds


def _changes(left: Mapping[str, float], right: Mapping[str, float]) -> tuple[ShareChange, ...]:
    if not left or not right:
        return ()
    changes = (
        ShareChange(share=share, left_s=left.get(share, 0.0), right_s=right.get(share, 0.0))
        for share in dict.fromkeys((*left, *right))
    )
    return tuple(sorted(changes, key=lambda change: -abs(change.change_s)))
