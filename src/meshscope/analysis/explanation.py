"""Why one side of a comparison costs more: differences in bytes and seconds by phase, axis and part.

Every change is right minus left, in one step of the phase on one device (with a pipeline: one device of
every stage).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction

from meshscope.analysis.comparison import (
    CompilerChange,
    ExperimentDifference,
    Side,
    compiler_change,
    experiment_differences,
)
from meshscope.analysis.request import basis_of, measured_step_s
from meshscope.analysis.totals import Total, step_total
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime
from meshscope.serialize import picked

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTraffic(Total):
    """The collectives of one part over one axis in one step, and (kind, count) of each kind."""

    kinds: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceChange:
    """The traffic of one part of the model over one axis on both sides."""

    axis: str
    part: str
    left: PlaceTraffic
    right: PlaceTraffic

    @property
    def wire_change(self) -> Fraction:
        """Wire bytes of the right side minus those of the left side."""
        return self.right.wire_bytes - self.left.wire_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Seconds of one step and their parts. Parts are null if only the whole step is known.

    `low_s` and `high_s` bound the step if the time model provides an interval.
    """

    step_s: float
    low_s: float | None = None
    high_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    idle_s: float | None = None
    exposed_by_axis_s: Mapping[str, float] = field(default_factory=dict[str, float])
    by_part_s: Mapping[str, tuple[float, float]] = field(  # (compute, exposed) of each part
        default_factory=dict[str, tuple[float, float]]
    )
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """One phase on both sides. A side's cost is null if its step is neither timed nor modeled."""

    phase: Phase | None
    n_steps: tuple[int, int]
    places: tuple[PlaceChange, ...]
    costs: tuple[StepBreakdown | None, StepBreakdown | None]

    @property
    def wire_bytes(self) -> tuple[Fraction, Fraction]:
        """Wire bytes of a step on the left and on the right side."""
        left = sum((place.left.wire_bytes for place in self.places), start=Fraction(0))
        return left, sum((place.right.wire_bytes for place in self.places), start=Fraction(0))

    @property
    def count(self) -> tuple[int, int]:
        """Number of collectives of a step on the left and on the right side."""
        left = sum(place.left.count for place in self.places)
        return left, sum(place.right.count for place in self.places)

    @property
    def step_change_s(self) -> float | None:
        """Step time of the right side minus that of the left side; null if one is unknown."""
        left, right = self.costs
        return None if left is None or right is None else right.step_s - left.step_s

    @property
    def request_change_s(self) -> float | None:
        """Time of all steps of the right side minus that of the left side; null if one is unknown."""
        left, right = self.costs
        if left is None or right is None:
            return None
        return right.step_s * self.n_steps[1] - left.step_s * self.n_steps[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How two experiments differ, and what that changes in each phase.

    `compiler` is what else changes where only the versions of the compiler differ.
    """

    left: Side
    right: Side
    differences: tuple[ExperimentDifference, ...]
    changes: tuple[PhaseChange, ...]
    compiler: CompilerChange | None = None

    @property
    def shared_changes(self) -> tuple[PhaseChange, ...]:
        """The phases that both sides have."""
        sides = (self.left, self.right)
        return tuple(c for c in self.changes if all(side.has_phase(c.phase) for side in sides))

    def request_s(self, side: int) -> float | None:
        """Seconds of all steps of side 0 (left) or 1 (right); null if a step is unknown."""
        costs = [change.costs[side] for change in self.changes]
        if not costs or None in costs:
            return None
        steps = zip(costs, self.changes, strict=True)
        return sum(cost.step_s * change.n_steps[side] for cost, change in steps if cost is not None)


def explain(left: Side, right: Side) -> Explanation:
    """The differences between two sides in experiment, bytes and seconds."""
    changes = phase_changes(
        left.run.rows_of(left.source),
        right.run.rows_of(right.source),
        left_costs=_step_breakdowns(left),
        right_costs=_step_breakdowns(right),
    )
    differences = tuple(experiment_differences(left, right))
    return Explanation(
        left=left,
        right=right,
        differences=differences,
        changes=changes,
        compiler=compiler_change(left, right, differences),
    )


def _step_breakdowns(side: Side) -> dict[Phase, StepBreakdown]:
    """The step of each phase: measured for the measured source, modeled for the others."""
    if side.source is not Source.MEASURED:
        return {time.phase: _modeled_step(time) for time in side.run.times_of(side.source)}
    return {
        phase: StepBreakdown(step_s=step_s, basis="measured")
        for phase, step_s in measured_step_s(side.run).items()
    }


def _modeled_step(time: StepTime) -> StepBreakdown:
    parts = {part.part or UNKNOWN: (part.compute_s, part.exposed_s) for part in time.parts}
    return StepBreakdown(
        step_s=time.step.value_s,
        by_part_s=parts,
        **picked(time.step, "low_s", "high_s"),
        **picked(time, "compute_s", "exposed_s", "idle_s", "exposed_by_axis_s"),
        basis=basis_of([time]) or UNKNOWN,
    )


def phase_changes(
    left: Sequence[Collective],
    right: Sequence[Collective],
    *,
    left_costs: Mapping[Phase, StepBreakdown],
    right_costs: Mapping[Phase, StepBreakdown],
) -> tuple[PhaseChange, ...]:
    """The changes of each phase; within a phase, the place whose bytes change most comes first."""
    phases: set[Phase | None] = {*left_costs, *right_costs, *(row.phase for row in (*left, *right))}
    return tuple(
        PhaseChange(
            phase=phase,
            n_steps=(_n_steps(left, phase), _n_steps(right, phase)),
            places=_places(left, right, phase),
            costs=(left_costs.get(phase), right_costs.get(phase)) if phase else (None, None),
        )
        for phase in (*Phase, None)
        if phase in phases
    )


def _n_steps(rows: Iterable[Collective], phase: Phase | None) -> int:
    return max((row.n_steps for row in rows if row.phase is phase), default=1)


def _places(
    left: Sequence[Collective], right: Sequence[Collective], phase: Phase | None
) -> tuple[PlaceChange, ...]:
    sides = [_by_place(row for row in rows if row.phase is phase) for rows in (left, right)]
    places = [
        PlaceChange(
            axis=axis,
            part=part,
            left=_traffic(sides[0].get((axis, part), ())),
            right=_traffic(sides[1].get((axis, part), ())),
        )
        for axis, part in dict.fromkeys((*sides[0], *sides[1]))
    ]
    return tuple(sorted(places, key=lambda place: -abs(place.wire_change)))


def _by_place(rows: Iterable[Collective]) -> dict[tuple[str, str], list[Collective]]:
    places: dict[tuple[str, str], list[Collective]] = {}
    for row in rows:
        places.setdefault((row.axis or UNKNOWN, row.part or UNKNOWN), []).append(row)
    return places


def _traffic(rows: Sequence[Collective]) -> PlaceTraffic:
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds[row.kind.value] += row.count
    return PlaceTraffic(**asdict(step_total(rows)), kinds=tuple(sorted(kinds.items())))
