"""A budget for the communication, time and memory of a program, and how a run keeps it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from meshscope.analysis.traffic import Filter, Traffic, traffic_of
from meshscope.errors import SpecError
from meshscope.events.collective import Collective, OtherOperation
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.store.run import RunRecord

Value = float | int | Fraction | None


class Quantity(StrEnum):
    """What a limit bounds, in one step on one device."""

    COUNT = "count"
    PAYLOAD_BYTES = "payload_bytes"
    WIRE_BYTES = "wire_bytes"
    EXPOSED_S = "exposed_s"
    STEP_S = "step_s"
    FLOPS = "flops"
    MEMORY_BYTES = "memory_bytes"


# Those of collectives, which a filter by kind or axis applies to.
OF_COLLECTIVES = (
    Quantity.COUNT,
    Quantity.PAYLOAD_BYTES,
    Quantity.WIRE_BYTES,
    Quantity.EXPOSED_S,
)


class Bound(StrEnum):
    """How a limit compares: `max_count`, `min_flops`, or `count` for exactly so many."""

    MAX = "max"
    MIN = "min"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A bound on one quantity; `line` is that of the budget file."""

    quantity: Quantity
    bound: Bound
    value: float
    line: int | None = None

    @property
    def name(self) -> str:
        """The key of a budget file: `max_wire_bytes`, `min_flops`, `count`."""
        return self.quantity if self.bound is Bound.EQUAL else f"{self.bound}_{self.quantity}"

    def allows(self, value: float | Fraction) -> bool:
        """Whether a value keeps the limit."""
        match self.bound:
            case Bound.MAX:
                return value <= self.value
            case Bound.MIN:
                return value >= self.value
            case Bound.EQUAL:
                return value == self.value


LIMITS = {
    limit.name: limit
    for quantity in Quantity
    for bound in Bound
    for limit in [Limit(quantity=quantity, bound=bound, value=0.0)]
    if bound is not Bound.EQUAL or quantity is Quantity.COUNT
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits on what a filter selects; `places` start a message on a key of the filter."""

    of: Filter
    limits: tuple[Limit, ...]
    places: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A limit and the value of a run; None is unknown, and keeps no limit. `rows` make up the value.

    `others` are operations that may add to it.
    """

    of: Filter
    limit: Limit
    value: Value
    rows: tuple[Collective, ...] = ()
    others: tuple[OtherOperation, ...] = ()

    @property
    def is_kept(self) -> bool:
        """Whether the value is known and within the limit."""
        return self.value is not None and self.limit.allows(self.value)


def checks_of(run: RunRecord, budgets: Sequence[Budget]) -> tuple[Check, ...]:
    """One check for each limit, of the strongest source of the run.

    SpecError for an axis or a phase that the program does not have: nothing crosses it, so that a misspelled
    one would keep every limit.
    """
    for budget in budgets:
        _check_filter(run, budget)
    return tuple(check for budget in budgets for check in _checks(run, budget))


def _check_filter(run: RunRecord, budget: Budget) -> None:
    experiment, rows = run.manifest.experiment, run.rows_of(run.manifest.source)
    phase, phases = budget.of.phase, {*run.manifest.phases, *(row.phase for row in rows)}
    if phase is not None and None not in phases and phase not in phases:
        known = ", ".join(one for one in Phase if one in phases)
        raise SpecError(
            f"{budget.places.get('phase', '')}the program has no phase '{phase}'. Known: {known}."
        )
    is_laid_out = experiment.mesh or experiment.plan or experiment.function
    if budget.of.axis is None or not is_laid_out:
        return
    axes = {*experiment.mesh, *(one for row in rows if row.axis for one in row.axis.split("+"))}
    for axis in budget.of.axis.split("+"):
        if axis not in axes:
            known = f"Known: {', '.join(sorted(axes))}." if axes else "It runs on one device."
            raise SpecError(
                f"{budget.places.get('axis', '')}the program has no axis '{axis}'. {known}"
            )


def _checks(run: RunRecord, budget: Budget) -> Iterator[Check]:
    traffic = traffic_of(run.rows_of(run.manifest.source), budget.of)
    phase = budget.of.phase
    others = tuple(o for o in run.open_operations if None in {phase, o.phase} or o.phase is phase)
    for limit in budget.limits:
        is_of_rows = limit.quantity in OF_COLLECTIVES
        value = _TRAFFIC[limit.quantity](traffic) if is_of_rows else _of_step(run, budget, limit)
        rows = traffic.rows if is_of_rows else ()
        is_least = is_of_rows and bool(others)
        if is_least and value is not None and limit.bound is not Bound.MIN and value <= limit.value:
            value = None
        yield Check(
            of=budget.of, limit=limit, value=value, rows=rows, others=others if is_least else ()
        )


_TRAFFIC: dict[Quantity, Callable[[Traffic], Value]] = {
    Quantity.COUNT: lambda traffic: traffic.count,
    Quantity.PAYLOAD_BYTES: lambda traffic: traffic.payload_bytes,
    Quantity.WIRE_BYTES: lambda traffic: traffic.wire_bytes,
    Quantity.EXPOSED_S: lambda traffic: traffic.exposed_s,
}


def _of_step(run: RunRecord, budget: Budget, limit: Limit) -> Value:
    """Seconds or FLOPs of the steps of a phase, or the memory of a device; None if unknown."""
    source = run.manifest.source
    if limit.quantity is Quantity.MEMORY_BYTES:
        memory = run.memory.get(source)
        return None if memory is None else memory.total_bytes
    phase = budget.of.phase
    times = [time for time in run.times_of(source) if phase in {None, time.phase}]
    if not times:
        return None
    return sum(
        _seconds(time) if limit.quantity is Quantity.STEP_S else time.flops for time in times
    )


def _seconds(time: StepTime) -> float:
    return time.step.value_s
