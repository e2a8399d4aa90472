"""A budget for the communication, time and memory of a program, and how a run keeps it.

A row counts for what it does, however the compiler wrote it: asynchronous, combined with others, or
decomposed into permutes. A row that the reader could not attribute counts for every axis, and a kernel that
chooses its targets counts for every kind, so that a filter never reads the unknown as zero.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from math import inf
from numbers import Real
from operator import eq, ge, le
from typing import Any

from meshscope.errors import SpecError, nearest, read_only
from meshscope.events.collective import Collective, OtherOperation
from meshscope.events.enums import Kind, Phase
from meshscope.plans.plan import MESH_AXES
from meshscope.store.run import RunRecord

Value = float | int | Fraction | None
OPAQUE = "custom-call"  # opcode of a kernel that communicates by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selects collectives; None selects all. `axis` is one name, or several joined by `+`."""

    kind: Kind | None = None
    axis: str | None = None
    phase: Phase | None = None

    def matches(self, row: Collective) -> bool:
        """Whether the row may be one of these: unknown axes and opaque kernels are.

        What stays on its device crosses no axis.
        """
        is_kind = self.kind in {None, row.kind} or row.opcode == OPAQUE
        is_phase = self.phase in {None, row.phase} or row.phase is None
        is_over = self.axis is None
        if self.axis is not None and not (row.group_size == 1 and row.wire_bytes == 0):
            is_over = row.axis is None or {*self.axis.split("+")} <= {*row.axis.split("+")}
        return is_kind and is_phase and is_over

    def __str__(self) -> str:
        """`all_gather over dp in decode`."""
        words = [self.kind.value if self.kind else "collectives"]
        words += [f"over {self.axis}"] if self.axis else []
        words += [f"in {self.phase}"] if self.phase else []
        return " ".join(words)


FILTERS: dict[str, type[StrEnum] | None] = {"phase": Phase, "axis": None, "kind": Kind}


def filter_of(**names: Any) -> Filter:
    """The filter by names of FILTERS; SpecError for a phase or kind that is not known."""
    for name, value in names.items():
        kind = FILTERS[name]
        if value is not None and not isinstance(value, str):
            raise SpecError(f"{name}={value!r} must be text.")
        if value is not None and kind is not None and value not in set(kind):
            raise SpecError(f"'{value}' is no {name}. {nearest(value, kind)}")
    phase, kind = names.get("phase"), names.get("kind")
    return Filter(
        kind=None if kind is None else Kind(kind),
        axis=names.get("axis"),
        phase=None if phase is None else Phase(phase),
    )


class Quantity(StrEnum):
    """What a limit bounds, in one step on one device."""

    COUNT = "count"
    PAYLOAD_BYTES = "payload_bytes"
    WIRE_BYTES = "wire_bytes"
    EXPOSED_S = "exposed_s"
    STEP_S = "step_s"
    FLOPS = "flops"
    MEMORY_BYTES = "memory_bytes"
    CERTAIN_FINDINGS = "certain_findings"  # by lint, in all programs


# Quantities of collectives, which a filter by kind or axis selects.
OF_COLLECTIVES = (Quantity.COUNT, Quantity.PAYLOAD_BYTES, Quantity.WIRE_BYTES, Quantity.EXPOSED_S)


class Bound(StrEnum):
    """How a limit compares: `max_count`, `min_flops`, or `count` for an exact value."""

    MAX = "max"
    MIN = "min"
    EQUAL = "equal"


_COMPARE: dict[Bound, Callable[[float | Fraction, float], bool]] = {
    Bound.MAX: le,
    Bound.MIN: ge,
    Bound.EQUAL: eq,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A bound on one quantity; `line` is its line in the budget file."""

    quantity: Quantity
    bound: Bound
    value: float
    line: int | None = None

    def __post_init__(self) -> None:
        """Check that the value is one that the quantity can have."""
        is_count = self.quantity in {Quantity.COUNT, Quantity.CERTAIN_FINDINGS}
        if not _is_possible(self.value, is_count=is_count):
            what = "a whole number" if is_count else "a finite number"
            raise SpecError(f"{self.name}={self.value!r} must be {what}, at least 0.")

    @property
    def name(self) -> str:
        """The key of a budget file: `max_wire_bytes`, `min_flops`, `count`."""
        return self.quantity if self.bound is Bound.EQUAL else f"{self.bound}_{self.quantity}"

    def allows(self, value: float | Fraction) -> bool:
        """Whether a value keeps the limit."""
        return _COMPARE[self.bound](value, self.value)


def _is_possible(value: Any, *, is_count: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return 0 <= float(value) < inf and not (is_count and float(value) % 1)


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


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A limit and the value of a run; None is unknown and violates it. `rows` make up the value.

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


def checks_of(
    run: RunRecord, budgets: Sequence[Budget], n_certain: Callable[[], int | None]
) -> tuple[Check, ...]:
    """One check for each limit, of the strongest source of the run; `n_certain` counts the certain findings of lint.

    SpecError for an axis or a phase that the program does not have: nothing crosses it, so that a misspelled
    one would keep every limit.
    """
    for budget in budgets:
        _check_filter(run, budget)
    return tuple(
        Check(of=budget.of, limit=limit, value=n_certain())
        if limit.quantity is Quantity.CERTAIN_FINDINGS
        else _check(run, budget.of, limit)
        for budget in budgets
        for limit in budget.limits
    )


def _check(run: RunRecord, of: Filter, limit: Limit) -> Check:
    source, phase = run.manifest.source, of.phase
    if limit.quantity is Quantity.MEMORY_BYTES:
        memory = run.memory.get(source)
        return Check(of=of, limit=limit, value=None if memory is None else memory.total_bytes)
    if limit.quantity not in OF_COLLECTIVES:
        times = [time for time in run.times_of(source) if phase in {None, time.phase}]
        is_time = limit.quantity is Quantity.STEP_S
        values = [time.step.value_s if is_time else time.flops for time in times]
        return Check(of=of, limit=limit, value=sum(values) if values else None)
    rows = [row for row in run.rows_of(source) if of.matches(row)]
    rows.sort(key=lambda row: -(row.wire_bytes or 0) * row.count)
    others = tuple(o for o in run.open_operations if None in {phase, o.phase} or o.phase is phase)
    name, value = limit.quantity, None
    sizes = [1 if name is Quantity.COUNT else getattr(row, name) for row in rows]
    if None not in sizes:
        zero = Fraction(0) if name is Quantity.WIRE_BYTES else 0
        value = sum((size * row.count for size, row in zip(sizes, rows, strict=True)), zero)
    if others and value is not None and limit.bound is not Bound.MIN and value <= limit.value:
        value = None  # the other operations may add to it
    return Check(of=of, limit=limit, value=value, rows=tuple(rows), others=others)


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
    if experiment.plan:  # nothing crosses axes of size 1, and dp and fsdp are one axis
        other = {"dp": "fsdp", "fsdp": "dp"}
        axes |= {*MESH_AXES} - {other.get(axis) for axis in axes}
    for axis in budget.of.axis.split("+"):
        if axis not in axes:
            known = f"Known: {', '.join(sorted(axes))}." if axes else "It runs on one device."
            raise SpecError(
                f"{budget.places.get('axis', '')}the program has no axis '{axis}'. {known}"
            )
