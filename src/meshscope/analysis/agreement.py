"""Whether times agree: the steps of two sources of a run, and the requests of two runs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from meshscope.analysis.request import request_times
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import NO_TIME, StepTime, TimeEstimate
from meshscope.store.run import RunRecord

SAME_FRAC = 0.005  # relative difference below which two times without intervals are equal
RESOLUTION_FRAC = 0.03  # and two modeled times: smaller differences are not resolved


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
        """The changes by activity if known, else by part."""
        return self.activities or self.parts

    @property
    def is_within(self) -> bool:
        """Whether the intervals overlap; a time without an interval is a point."""
        return _overlap(self.left, self.right)

    @property
    def ratio(self) -> float:
        """The right time over the left time."""
        return self.right.value_s / self.left.value_s if self.left.value_s else float("inf")


def _overlap(left: TimeEstimate, right: TimeEstimate) -> bool:
    return left.lower_s <= right.upper_s and right.lower_s <= left.upper_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """Seconds of a request, and of each of its activities; {} if those are unknown.

    Costs with the same `basis`, a source and a chip, have the same relative error in an activity.
    """

    seconds: TimeEstimate
    activities: Mapping[str, float]
    basis: tuple[Source, str]

    def per(self, n: int) -> "RequestCost":
        """The cost of one of `n` equal parts."""
        activities = {name: seconds / n for name, seconds in self.activities.items()}
        return replace(self, seconds=self.seconds * (1 / n), activities=activities)


def request_cost(times: Iterable[StepTime], *, n_decode_steps: int, chip: str) -> RequestCost:
    """The cost of a request whose phases take these step times."""
    seconds, activities, sources = NO_TIME, defaultdict[str, float](float), set[Source]()
    for time in times:
        n = n_decode_steps if time.phase is Phase.DECODE else 1
        seconds += time.step * n
        for spent in time.activities:  # whatever the axis of communication
            activities[spent.activity.value] += n * spent.seconds
        sources.add(time.source)
    (source,) = sources
    return RequestCost(seconds=seconds, activities=activities, basis=(source, chip))


def request_cost_of(run: RunRecord, source: Source) -> RequestCost | None:
    """The cost of the request of a run, or of its only phase, by one source; None if it is unknown."""
    request, experiment = request_times(run).get(source), run.manifest.experiment
    chip = "" if experiment.chip is None else experiment.chip.name
    if source is not Source.MEASURED and experiment.workload is not None and run.times_of(source):
        n_steps = experiment.workload.n_decode_steps
        return request_cost(run.times_of(source), n_decode_steps=n_steps, chip=chip)
    seconds = None if request is None else request.e2e or request.ttft or request.tpot
    if seconds is None:
        return None
    return RequestCost(seconds=seconds, activities={}, basis=(source, chip))


def are_equal(left: RequestCost, right: RequestCost) -> bool:
    """Whether two requests take the same time within the errors that they do not share.

    Their intervals overlap. With the same basis, work common to both has the same error,
    which leaves the relative error of the seconds by which their activities differ.
    """
    sides = (left.seconds, right.seconds)
    change_s = abs(left.seconds.value_s - right.seconds.value_s)
    least_s = min(side.value_s for side in sides)
    if all(side.low_s is None for side in sides):
        return change_s <= SAME_FRAC * least_s
    if not _overlap(*sides) or change_s <= RESOLUTION_FRAC * least_s:
        return _overlap(*sides)
    if left.basis != right.basis or not left.activities or not right.activities:
        return True
    error_frac = max(
        max(side.upper_s / side.value_s - 1, 1 - side.lower_s / side.value_s) for side in sides
    )
    changes = _changes(left.activities, right.activities)
    return change_s <= error_frac * sum(abs(change.change_s) for change in changes)


def time_agreements(run: RunRecord, left: Source, right: Source) -> tuple[TimeAgreement, ...]:
    """One for each phase whose step has a time by both sources."""
    requests = [request_times(run).get(source) for source in (left, right)]
    modeled = [{time.phase: time for time in run.times_of(source)} for source in (left, right)]
    agreements: list[TimeAgreement] = []
    for phase, name in ((Phase.PREFILL, "ttft"), (Phase.DECODE, "decode_step")):
        first, second = (getattr(request, name, None) for request in requests)
        if first is not None and second is not None:
            shares = (_shares(times.get(phase)) for times in modeled)
            both = [_changes(*pair) for pair in zip(*shares, strict=True)]
            changes = dict(zip(("parts", "activities"), both, strict=True))
            agreements.append(TimeAgreement(phase=phase, left=first, right=second, **changes))
    return tuple(agreements)


def _shares(time: StepTime | None) -> tuple[Mapping[str, float], Mapping[str, float]]:
    activities: defaultdict[str, float] = defaultdict(float)
    for spent in () if time is None else time.activities:
        over = f" over {spent.axis}" if spent.axis else ""
        activities[spent.activity.value + over] += spent.seconds
    parts = () if time is None else time.parts
    return {p.part or BETWEEN_PARTS: p.compute_s + p.exposed_s for p in parts}, activities


def _changes(left: Mapping[str, float], right: Mapping[str, float]) -> tuple[ShareChange, ...]:
    if not left or not right:
        return ()
    changes = (
        ShareChange(share=share, left_s=left.get(share, 0.0), right_s=right.get(share, 0.0))
        for share in dict.fromkeys((*left, *right))
    )
    return tuple(sorted(changes, key=lambda change: -abs(change.change_s)))
