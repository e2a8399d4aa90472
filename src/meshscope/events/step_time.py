"""How long a step takes on one device, and what makes up that time; where each figure comes from."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshscope.events.enums import Phase, Source


class TimeBasis(StrEnum):
    """Where a duration comes from."""

    MEASURED = "measured"
    COMPILER_CYCLES = "compiler_cycles"
    CYCLE_PROFILE = "cycle_profile"
    INTERCONNECT_MODEL = "interconnect_model"
    ROOFLINE = "roofline"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """A duration in seconds, and between which values it is taken to lie; null where nothing tells."""

    s: float
    low_s: float | None
    high_s: float | None

    def __add__(self, other: "TimeEstimate") -> "TimeEstimate":
        """One after the other; both may err in the same direction."""
        return TimeEstimate(
            s=self.s + other.s,
            low_s=None if None in (self.low_s, other.low_s) else self.low() + other.low(),
            high_s=None if None in (self.high_s, other.high_s) else self.high() + other.high(),
        )

    def __mul__(self, factor: float) -> "TimeEstimate":
        """That many times."""
        return TimeEstimate(
            s=self.s * factor,
            low_s=None if self.low_s is None else self.low_s * factor,
            high_s=None if self.high_s is None else self.high_s * factor,
        )

    def low(self) -> float:
        """The lower end, or the duration itself where it is not known."""
        return self.s if self.low_s is None else self.low_s

    def high(self) -> float:
        """The upper end, or the duration itself where it is not known."""
        return self.s if self.high_s is None else self.high_s


NO_TIME = TimeEstimate(s=0.0, low_s=0.0, high_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """What one part of the model asks of a device in one step.

    `flops`, `hbm_bytes` and `wire_bytes` are null where they are not known. `collective_s` adds up
    the durations of the collectives, hidden or not; `exposed_s` is the time in which the core waits
    for one.
    """

    part: str | None
    compute_s: float
    collective_s: float
    exposed_s: float
    flops: float | None = None
    hbm_bytes: float | None = None
    wire_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnestimatedWork:
    """Work that no estimate of the compiler covers: what, how often, and the time taken for it."""

    opcode: str
    count: int
    seconds: TimeEstimate
    is_known: bool  # whether the operation is one that we know how to price


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of a phase on one device, in seconds: `step` = compute + exposed + idle.

    `exposed_s` is the time in which a collective is under way and the core computes nothing, by
    union of intervals; `exposed_by_axis_s` splits it by the axis of the collective that is waited
    for. `idle_s` is the rest: waiting for copies, and `bubble_s` of it for other pipeline stages.
    `collective_s` adds up the durations of all collectives, hidden or not.
    """

    source: Source
    phase: Phase
    step: TimeEstimate
    compute_s: float
    exposed_s: float
    idle_s: float
    bubble_s: float
    collective_s: float
    exposed_by_axis_s: Mapping[str, float]
    by_basis_s: Mapping[str, float]  # of compute and exposed, by TimeBasis
    parts: tuple[PartCost, ...]
    unestimated: tuple[UnestimatedWork, ...] = ()
    is_extrapolated: bool = False
    notes: tuple[str, ...] = ()

    @property
    def unestimated_frac(self) -> float:
        """Share of the step that no estimate of the compiler covers."""
        total = sum(u.seconds.s for u in self.unestimated)
        return total / self.step.s if self.step.s else 0.0
