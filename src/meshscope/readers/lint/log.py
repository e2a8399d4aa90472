"""What following a program shows: faults at instructions, and sums of equal copies until their scale matters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Literal

from meshscope.plans.mesh import Groups
from meshscope.readers.hlo.groups import Devices
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.lint.states import (
    A_PART,
    HIDDEN,
    MIXED,
    REPLICATED,
    SUMS,
    UNKNOWN,
    WHOLE,
    Double,
    Factors,
    Value,
    is_hidden,
    is_placed,
    is_split,
    split_dims,
)

Mark = Literal["seen", "used", "undone"]
Order = list[tuple[Instruction, tuple[int, ...]]]  # collectives as they run, with their factors
# Opcode, maker and dims of the operand, dims of the collective, groups.
Sent = tuple[str, Instruction | None, tuple[int, ...], tuple[int, ...], Groups]


class Fault(StrEnum):
    """What a finding says."""

    MISSING = "missing_reduction"
    DOUBLE = "double_reduction"
    COUNTED = "replicated_counted_twice"
    GROUPS = "wrong_groups"
    CONSTANT = "constant_collective"
    GATHERED = "gather_of_replicated"
    PARTS = "sum_of_parts"
    MISMATCH = "mismatched_parts"
    UNGATHERED = "missing_gather"
    DIVERGES = "divergent_collectives"
    SLICED = "sliced_collective"
    REPEATED = "repeated_collective"
    RETURNS = "returning_reshard"
    ALIKE = "replicated_work"


WASTE = frozenset({Fault.CONSTANT, Fault.SLICED, Fault.REPEATED, Fault.RETURNS, Fault.ALIKE})


@dataclass(frozen=True, slots=True)
class Note:
    """A fault at an instruction, over factors of the mesh; `origins` are the sums that it is about."""

    fault: Fault
    is_certain: bool
    at: Instruction
    factors: tuple[int, ...]
    origins: frozenset[Instruction] = frozenset()


@dataclass(slots=True)
class Log:
    """The notes about a program."""

    factors: Factors
    devices: Devices
    notes: dict[tuple[Fault, str, tuple[int, ...]], Note] = field(default_factory=dict)
    reasons: dict[str, set[str]] = field(default_factory=dict)  # of instructions that are unknown
    _missing: list[Note] = field(default_factory=list)
    _mixed: list[Note] = field(default_factory=list)
    rings: set[int] = field(default_factory=set)  # factors that permutes cross
    _open: dict[Instruction, Note] = field(default_factory=dict)
    _doubles: dict[Double, set[Mark]] = field(default_factory=dict)
    # Operands of collectives with their factors, the first of those that send the same, and the order in which they run.
    operands: dict[Instruction, tuple[Value, tuple[int, ...]]] = field(default_factory=dict)
    first: dict[Sent, Instruction] = field(default_factory=dict)
    order: Order = field(default_factory=list)
    # Of collectives: the factors over which their result is sliced; empty if it is used in another way, too.
    sliced: dict[Instruction, set[int]] = field(default_factory=dict)

    def note(
        self,
        fault: Fault,
        at: Instruction,
        factors: Sequence[int],
        origins: frozenset[Instruction] = frozenset(),
        *,
        is_certain: bool = False,
    ) -> None:
        """Keeps a fault; a certain one replaces a possible one."""
        key = (fault, at.name, tuple(factors))
        known = self.notes.get(key)
        if known is None or (is_certain and not known.is_certain):
            self.notes[key] = Note(fault, is_certain, at, tuple(factors), origins)

    def missing(
        self, at: Instruction, used: Mapping[int, bool], sums: frozenset[Instruction]
    ) -> None:
        """A partial sum is used as if it were whole over some factors, certainly or not; what follows is no other fault."""
        for is_certain in (True, False):
            factors = tuple(factor for factor, certain in used.items() if certain is is_certain)
            if factors:
                self._missing.append(Note(Fault.MISSING, is_certain, at, factors, sums))

    def mismatch(self, at: Instruction, of: Iterable[tuple[int, int, int]]) -> None:
        """Two arrays that are split along other dims meet; `of` has how they and their result are held."""
        wrong = [
            f
            for f, (a, b, result) in enumerate(of)
            if result == UNKNOWN and is_split(a) and is_split(b) and not is_hidden(a | b)
        ]
        self.note(Fault.MISMATCH, at, wrong) if wrong else None

    def ungathered(self, at: Instruction, value: Value, over: Sequence[int] = ()) -> None:
        """An array is laid out along a dim from copies of a part, or from parts along another dim."""
        along = {at.dimensions[0]}
        is_along = [bool({*split_dims(h)} & along) for h in value.held]
        wrong = [f for f in over if is_placed(value.held[f]) and not is_along[f]]
        seen = [
            dims for f in over if (dims := {d for d in split_dims(value.held[f]) if d < HIDDEN})
        ]
        wrong = [*over] if seen and not set.intersection(*seen) else wrong
        if not over and (len(at.operands) > 2 or at.shape_text.startswith(("s", "u"))):
            wrong += [f for f, h in enumerate(value.held) if h == A_PART]
        if not over or any(value.held[f] == REPLICATED for f in over):
            others = (f for f, h in enumerate(value.held) if f not in over and is_placed(h))
            wrong += [f for f in others if is_along[f]]
        self.note(Fault.UNGATHERED, at, wrong) if wrong else None

    def origins(self, at: Instruction, values: Sequence[Value]) -> frozenset[tuple[int, bool]]:
        """What the devices split in all of the values; rows of the data do not belong to parts of weights."""
        every = frozenset[tuple[int, bool]]().union(*(value.origins for value in values))
        mixed = sorted({f for f, _ in every if {(f, False), (f, True)} <= every})
        if mixed:
            self._mixed.append(Note(Fault.MISMATCH, False, at, tuple(mixed)))
        return frozenset(one for one in every if one[0] not in mixed)

    def misused(self, at: Instruction, value: Value) -> list[int]:
        """A value is used where only a whole one may be; returns the factors over which it is a partial sum."""
        sums = [f for f, held in enumerate(value.held) if held in SUMS]
        is_certain = any(value.held[f] == MIXED for f in sums)
        self.missing(at, dict.fromkeys(sums, is_certain), value.sums)
        return sums

    def disagree(self, at: Instruction, values: Sequence[Value]) -> None:
        """One path returns a partial sum, and another one a value that is whole."""
        each = [{value.held[f] for value in values} for f in range(len(self.factors.all))]
        open_on = {f: False for f, h in enumerate(each) if REPLICATED in h and h & {*SUMS}}
        self.missing(at, open_on, frozenset[Instruction]().union(*(v.sums for v in values)))

    def mark(self, doubles: Iterable[Double], what: Mark = "seen") -> None:
        """Sums of equal copies: used where their scale matters, or undone by a division by the number of copies."""
        for double in doubles:
            self._doubles.setdefault(double, set()).add(what)

    def sent(self, at: Instruction, operand: Value, result: Value) -> None:
        """A collective runs; one before it may have sent the same array, or have taken it from there."""
        if not self.order or self.order[-1][0] is not at:
            return  # its groups are no groups over axes
        over, by = self.order[-1][1], operand.by
        opcode, groups = at.opcode.removesuffix("-start"), self.devices.groups(at)[0]
        first = self.first.setdefault((opcode, by, operand.dims, at.dimensions, groups), at)
        if by is not None and first is not at:
            self.note(Fault.REPEATED, at, over, frozenset({first}))
        if by in self.operands and opcode == "all-to-all" == by.opcode.removesuffix("-start"):
            before, others = self.operands[by]
            if (before.dims, others) == (result.dims, over):
                self.note(Fault.RETURNS, at, over, frozenset({by}))
        self.operands[at] = operand, over

    def opened(
        self,
        at: Instruction,
        over: Sequence[int],
        operand: Value,
        fault: Fault = Fault.MISSING,
    ) -> None:
        """A collective over a part of an axis, along which its operand is held alike: a later one has to complete it."""
        self._open.pop(operand.by, None) if operand.by is not None else None
        reduced = {(self.factors.all[f].axis, operand.held[f]) for f in over}
        rest = tuple(
            f
            for f, held in enumerate(operand.held)
            if f not in over
            and held not in (REPLICATED, UNKNOWN)
            and (self.factors.all[f].axis, held) in reduced
            and self.factors.all[f].axis != WHOLE  # which may be several axes
        )
        if rest and not at.shape_text.startswith(("s", "u")):  # not of indices
            self._open[at] = Note(fault, False, at, rest, operand.sums)

    def slice(self, whole: Value, parts: Sequence[int], shape: tuple[int, ...]) -> None:
        """Each device takes its part, over some factors, of what a collective may have given to all of them."""
        if whole.by is not None and whole.by in self.operands:
            n = prod(self.factors.all[f].size for f in parts)
            is_part = n > 1 and n * prod(shape) == prod(whole.dims)
            self.sliced.setdefault(whole.by, set(parts)).intersection_update(
                parts if is_part else ()
            )

    def close(self) -> None:
        """Notes each missing reduction once, and sums of equal copies unless their scale is undone."""
        known_of: dict[tuple[int, ...], set[Instruction]] = {}
        self._missing += self._open.values()
        for one in sorted(self._missing, key=lambda one: not one.is_certain):
            known = known_of.setdefault(one.factors, set())
            if not one.origins & known:
                self.note(one.fault, one.at, one.factors, one.origins, is_certain=one.is_certain)
            known |= one.origins
        for one in self._mixed:  # a ring gathers rows while it multiplies them
            if not {*one.factors} & self.rings:
                self.note(one.fault, one.at, one.factors)
        for double, marks in self._doubles.items():
            if "used" in marks or "undone" not in marks:
                fault = Fault.GROUPS if double.is_part else Fault.DOUBLE
                at, factors = double.instruction, double.factors
                self.note(fault, at, factors, is_certain="used" in marks)
        for at, sliced in self.sliced.items():
            self.note(Fault.SLICED, at, sorted(sliced)) if sliced else None

    def unknown(self, at: Instruction, dims: tuple[int, ...], reason: str) -> Value:
        """A value that is not followed."""
        self.reasons.setdefault(reason, set()).add(at.name)
        return Value(dims=dims, held=(UNKNOWN,) * len(self.factors.all), reason=reason)

    def of_numbers(self, value: Value) -> Value:
        """A scalar that is held as its numbers say, if they are known on every device."""
        if value.known is None:
            return value
        varied = self.factors.along(value.known)
        held = (A_PART if f in varied else REPLICATED for f in range(len(self.factors.all)))
        constant = None if varied else float(value.known[0])
        return value._replace(held=tuple(held), constant=constant)

    def replicated(self, dims: tuple[int, ...], constant: float | None = None) -> Value:
        """A value that is equal everywhere."""
        held = (REPLICATED,) * len(self.factors.all)
        return Value(dims=dims, held=held, constant=constant, is_plain=True)
