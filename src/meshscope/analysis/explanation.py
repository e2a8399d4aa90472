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
        """Wire bytes of the right side minus the left side."""
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
        """Step time of the right side minus the left side; null if one is unknown."""
        left, right = self.costs
        return None if left is None or right is None else right.step_s - left.step_s

    @property
    def request_s(self) -> tuple[float | None, float | None]:
        """Time of all steps of the left and of the right side; null if unknown."""
        left, right = (
            None if cost is None else cost.step_s * n
            for cost, n in zip(self.costs, self.n_steps, strict=True)
        )
        return left, right

    @property
    def request_change_s(self) -> float | None:
        """Time of all steps of the right side minus the left side; null if one is unknown."""
        left, right = self.request_s
        return None if left is None or right is None else right - left


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How two experiments differ, and what that changes in each phase.

    `compiler` has the other changes if only the compiler versions differ.
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
        seconds = [change.request_s[side] for change in self.changes]
        known = [one for one in seconds if one is not None]
        return sum(known) if known and len(known) == len(seconds) else None


def explain(left: Side, right: Side) -> Explanation:
    """The differences between two sides in experiment, bytes and seconds."""
    differences = tuple(experiment_differences(left, right))
    return Explanation(
        left=left,
        right=right,
        differences=differences,
        changes=phase_changes(
            left.run.rows_of(left.source),
            right.run.rows_of(right.source),
            left_costs=_step_breakdowns(left),
            right_costs=_step_breakdowns(right),
        ),
        compiler=compiler_change(left, right, differences),
    )


def _step_breakdowns(side: Side) -> dict[Phase, StepBreakdown]:
    if side.source is Source.MEASURED:
        return {
            phase: StepBreakdown(step_s=step_s, basis="measured")
            for phase, step_s in measured_step_s(side.run).items()
        }
    return {
        time.phase: StepBreakdown(
            step_s=time.step.value_s,
            by_part_s={p.part or UNKNOWN: (p.compute_s, p.exposed_s) for p in time.parts},
            **picked(time.step, "low_s", "high_s"),
            **picked(time, "compute_s", "exposed_s", "idle_s", "exposed_by_axis_s"),
            basis=basis_of([time]) or UNKNOWN,
        )
        for time in side.run.times_of(side.source)
    }


def phase_changes(
    left: Sequence[Collective],
    right: Sequence[Collective],
    *,
    left_costs: Mapping[Phase, StepBreakdown],
    right_costs: Mapping[Phase, StepBreakdown],
) -> tuple[PhaseChange, ...]:
    """The changes of each phase; within a phase, the place whose bytes change most comes first."""
    phases: set[Phase | None] = {*left_costs, *right_costs, *(row.phase for row in (*left, *right))}
    changes: list[PhaseChange] = []
    for phase in (*Phase, None):
        if phase in phases:
            ours, theirs = ([row for row in rows if row.phase is phase] for rows in (left, right))
            n_steps = (max((row.n_steps for row in rows), default=1) for rows in (ours, theirs))
            costs = (left_costs.get(phase), right_costs.get(phase)) if phase else (None, None)
            before, after = n_steps
            changes.append(
                PhaseChange(
                    phase=phase, n_steps=(before, after), places=_places(ours, theirs), costs=costs
                )
            )
    return tuple(changes)


def _places(left: Iterable[Collective], right: Iterable[Collective]) -> tuple[PlaceChange, ...]:
    sides: dict[tuple[str, str], tuple[list[Collective], list[Collective]]] = {}
    for side, rows in enumerate((left, right)):
        for row in rows:
            place = (row.axis or UNKNOWN, row.part or UNKNOWN)
            sides.setdefault(place, ([], []))[side].append(row)
    places: list[PlaceChange] = []
    for (axis, part), both in sides.items():
        kinds = [Counter[str](), Counter[str]()]
        for counts, rows in zip(kinds, both, strict=True):
            for row in rows:
                counts[row.kind.value] += row.count
        before, after = (
            PlaceTraffic(**asdict(step_total(rows)), kinds=tuple(sorted(counts.items())))
            for counts, rows in zip(kinds, both, strict=True)
        )
        places.append(PlaceChange(axis=axis, part=part, left=before, right=after))
    return tuple(sorted(places, key=lambda place: -abs(place.wire_change)))
