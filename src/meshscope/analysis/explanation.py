"""Why one side costs more than the other: differences in bytes and seconds by phase, axis and part.

Pure arithmetic on the rows and step times of two sides; every difference is right minus left, in one
step of the phase on one device (with a pipeline: one device of every stage).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from meshscope.analysis.request_time import basis_of
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficChange:
    """Operations of one place in one step, with how many there are of each kind.

    `n_unsized` of them have no known size and are in no bytes.
    """

    count: int = 0
    payload_bytes: int = 0
    wire_bytes: Fraction = Fraction(0)
    n_unsized: int = 0
    kinds: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLocation:
    """What both sides send for one part of the model over one axis."""

    axis: str
    part: str
    left: TrafficChange
    right: TrafficChange

    @property
    def wire_change(self) -> Fraction:
        """Wire bytes of the right side minus those of the left one."""
        return self.right.wire_bytes - self.left.wire_bytes

    @property
    def is_changed(self) -> bool:
        """Whether anything differs: bytes, counts or kinds."""
        return self.left != self.right


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCostChange:
    """Seconds of one step, by what takes them; null where only the whole is known.

    The step is taken to lie between `low_s` and `high_s`, where the model of time says so.
    """

    step_s: float
    low_s: float | None
    high_s: float | None
    compute_s: float | None
    exposed_s: float | None
    idle_s: float | None
    exposed_by_axis_s: Mapping[str, float]
    by_part_s: Mapping[str, tuple[float, float]]  # (compute, exposed) of each part
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """One phase on both sides; a side's `cost` is null where nothing was timed or modelled."""

    phase: Phase | None
    n_steps: tuple[int, int]
    places: tuple[CostLocation, ...]
    left_cost: StepCostChange | None
    right_cost: StepCostChange | None

    @property
    def wire_bytes(self) -> tuple[Fraction, Fraction]:
        """What a step sends on either side."""
        left = sum((place.left.wire_bytes for place in self.places), start=Fraction(0))
        return left, sum((place.right.wire_bytes for place in self.places), start=Fraction(0))

    @property
    def count(self) -> tuple[int, int]:
        """How many collectives a step has on either side."""
        return (
            sum(place.left.count for place in self.places),
            sum(place.right.count for place in self.places),
        )

    @property
    def step_change_s(self) -> float | None:
        """By how much a step of the right side takes longer; null where one is not known."""
        if self.left_cost is None or self.right_cost is None:
            return None
        return self.right_cost.step_s - self.left_cost.step_s


def cost_of(time: StepTime) -> StepCostChange:
    """The cost of a step whose time was modelled."""
    parts = {part.part or UNKNOWN: (part.compute_s, part.exposed_s) for part in time.parts}
    return StepCostChange(
        step_s=time.step.value_s,
        low_s=time.step.low_s,
        high_s=time.step.high_s,
        compute_s=time.compute_s,
        exposed_s=time.exposed_s,
        idle_s=time.idle_s,
        exposed_by_axis_s=time.exposed_by_axis_s,
        by_part_s=parts,
        basis=basis_of([time]) or UNKNOWN,
    )


def measured_cost(step_s: float) -> StepCostChange:
    """The cost of a step of which only the whole was measured."""
    return StepCostChange(
        step_s=step_s, low_s=None, high_s=None, compute_s=None, exposed_s=None, idle_s=None, exposed_by_axis_s={},
        by_part_s={}, basis="measured",
    )  # fmt: skip


def explained(
    left: Sequence[Collective],
    right: Sequence[Collective],
    *,
    left_costs: Mapping[Phase, StepCostChange],
    right_costs: Mapping[Phase, StepCostChange],
) -> tuple[PhaseChange, ...]:
    """What differs, phase by phase; within a phase the place with the largest change of bytes first."""
    rows = (*left, *right)
    timed = [phase for phase in Phase if phase in left_costs or phase in right_costs]
    found: list[Phase | None] = [*timed, *(row.phase for row in rows)]
    order = {phase: i for i, phase in enumerate(Phase)}
    phases = sorted(dict.fromkeys(found), key=lambda p: len(order) if p is None else order[p])
    return tuple(
        PhaseChange(
            phase=phase,
            n_steps=(_n_steps(left, phase), _n_steps(right, phase)),
            places=_places(left, right, phase),
            left_cost=None if phase is None else left_costs.get(phase),
            right_cost=None if phase is None else right_costs.get(phase),
        )
        for phase in phases
    )


def _n_steps(rows: Iterable[Collective], phase: Phase | None) -> int:
    return max((row.n_steps for row in rows if row.phase is phase), default=1)


def _places(
    left: Sequence[Collective], right: Sequence[Collective], phase: Phase | None
) -> tuple[CostLocation, ...]:
    sides = [_by_place(row for row in rows if row.phase is phase) for rows in (left, right)]
    places = [
        CostLocation(
            axis=key[0],
            part=key[1],
            left=_traffic(sides[0].get(key, ())),
            right=_traffic(sides[1].get(key, ())),
        )
        for key in dict.fromkeys((*sides[0], *sides[1]))
    ]
    return tuple(sorted(places, key=lambda place: -abs(place.wire_change)))


def _by_place(rows: Iterable[Collective]) -> dict[tuple[str, str], list[Collective]]:
    found: dict[tuple[str, str], list[Collective]] = {}
    for row in rows:
        found.setdefault((row.axis or UNKNOWN, row.part or UNKNOWN), []).append(row)
    return found


def _traffic(rows: Sequence[Collective]) -> TrafficChange:
    kinds: dict[str, int] = {}
    for row in rows:
        kinds[row.kind.value] = kinds.get(row.kind.value, 0) + row.count
    return TrafficChange(
        count=sum(row.count for row in rows),
        payload_bytes=sum(row.count * (row.payload_bytes or 0) for row in rows),
        wire_bytes=sum(
            (row.count * (row.wire_bytes or Fraction(0)) for row in rows), start=Fraction(0)
        ),
        n_unsized=sum(row.count for row in rows if row.wire_bytes is None),
        kinds=tuple(sorted(kinds.items())),
    )
