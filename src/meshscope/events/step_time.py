"""Time of one step on one device: its parts, and the basis of each figure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from meshscope.events.enums import Phase, Source
from meshscope.serialize import STORED


class TimeBasis(StrEnum):
    """How a duration was obtained."""

    MEASURED = "measured"
    COMPILER_CYCLES = "compiler_cycles"
    INTERCONNECT_MODEL = "interconnect_model"
    ROOFLINE = "roofline"
    KERNEL_MODEL = "kernel_model"  # a kernel's algorithm, from its operands and lengths
    KERNEL_STATED = "kernel_stated"  # the cost estimate of a kernel's author


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """A duration in seconds with the range expected to contain it; None if a bound is unknown."""

    value_s: float = field(metadata={STORED: "s"})
    low_s: float | None
    high_s: float | None

    def __add__(self, other: "TimeEstimate") -> "TimeEstimate":
        """Both durations in sequence; the ranges add up, as errors may be correlated."""
        return TimeEstimate(
            value_s=self.value_s + other.value_s,
            low_s=None if None in (self.low_s, other.low_s) else self.lower_s + other.lower_s,
            high_s=None if None in (self.high_s, other.high_s) else self.upper_s + other.upper_s,
        )

    def __mul__(self, factor: float) -> "TimeEstimate":
        """The duration repeated `factor` times."""
        return TimeEstimate(
            value_s=self.value_s * factor,
            low_s=None if self.low_s is None else self.low_s * factor,
            high_s=None if self.high_s is None else self.high_s * factor,
        )

    @property
    def lower_s(self) -> float:
        """The lower bound, or the estimate itself if the bound is unknown."""
        return self.value_s if self.low_s is None else self.low_s

    @property
    def upper_s(self) -> float:
        """The upper bound, or the estimate itself if the bound is unknown."""
        return self.value_s if self.high_s is None else self.high_s


NO_INTERVAL = "no interval: "  # begins the note of a step whose time has no bounds
NO_TIME = TimeEstimate(value_s=0.0, low_s=0.0, high_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """Cost of one part of the model on one device in one step.

    `flops`, `hbm_bytes` and `wire_bytes` are None if unknown. `collective_s` adds up all
    collectives, hidden or not; `exposed_s` is the time the core waits for one.
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
    """Work without a compiler estimate: the opcode, its count and the time assumed for it."""

    opcode: str
    count: int
    seconds: TimeEstimate
    is_known: bool  # whether a cost model exists for the opcode


class Activity(StrEnum):
    """What the core of a device does, or waits for."""

    MATMUL = "matmuls"
    KERNEL = "kernels"  # of attention and experts
    OTHER_KERNEL = "other kernels"
    SORT = "sorts"
    RELAYOUT = "copies between layouts"  # also transposes and conversions of arrays
    GATHER = "gathers of rows"  # one by one, as of embeddings
    BY_EXPERT = "sorting tokens by expert"  # gathers of rows of a mixture
    ELEMENTWISE = "memory-bound ops"  # without products
    SMALL = "latency of small ops"  # launch and latency take most of the time
    EXPOSED = "exposed communication"
    COPY = "waiting for HBM"
    BUBBLE = "pipeline bubble"

    @classmethod
    def _missing_(cls, value: object) -> "Activity | None":
        """The activity by its name in runs of older versions."""
        return _FORMER_ACTIVITIES.get(value)


_FORMER_ACTIVITIES: dict[object, Activity] = {
    "relayouts": Activity.RELAYOUT,
    "gathers": Activity.GATHER,
    "element-wise passes": Activity.ELEMENTWISE,
    "small operations": Activity.SMALL,
    "waiting for copies": Activity.COPY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityTime:
    """Seconds of a step in one activity, and what the device's resources do meanwhile.

    The HBM moves data for `hbm_busy_s` of the seconds, also for copies during compute. The activity takes
    `flops`, and `padding_flops` more to fill tiles of the matrix units. Exposed communication is split by
    `axis`, whose collectives send `wire_bytes`, hidden or not.
    """

    activity: Activity
    seconds: float
    hbm_busy_s: float
    flops: float = 0.0
    padding_flops: float = 0.0
    axis: str | None = None
    wire_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of a phase on one device, in seconds: `step` = compute + exposed + idle.

    `exposed_s` is the time (union of intervals) with a collective in flight and no compute;
    `exposed_by_axis_s` splits it by the plan axis of that collective. `idle_s` is the rest: waits
    for copies and, as `bubble_s`, for other pipeline stages. All are means over stages. `collective_s` adds up all
    collectives, hidden or not. The `activities` add up to the step; () if they are unknown.
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
    by_basis_s: Mapping[str, float]  # compute + exposed, split by TimeBasis
    parts: tuple[PartCost, ...]
    activities: tuple[ActivityTime, ...] = ()
    unestimated: tuple[UnestimatedWork, ...] = ()
    is_extrapolated: bool = False
    notes: tuple[str, ...] = ()

    @property
    def no_interval(self) -> str | None:
        """Why the step has no bounds: `no published times of collectives on h100 give the error of the model`."""
        notes = (
            note.removeprefix(NO_INTERVAL) for note in self.notes if note.startswith(NO_INTERVAL)
        )
        return "; ".join(notes) or None

    @property
    def unestimated_frac(self) -> float:
        """Fraction of the step without a compiler estimate."""
        total = sum(u.seconds.value_s for u in self.unestimated)
        return total / self.step.value_s if self.step.value_s else 0.0

    @property
    def flops(self) -> float:
        """FLOPs of one device, without work of unknown FLOPs."""
        return sum(part.flops or 0.0 for part in self.parts)

    @property
    def hbm_bytes(self) -> float:
        """Bytes that one device reads and writes in HBM, without work of unknown bytes."""
        return sum(part.hbm_bytes or 0.0 for part in self.parts)
