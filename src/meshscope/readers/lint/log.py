"""What following a program shows: faults at instructions, and sums of equal copies until their scale matters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from meshscope.readers.hlo.module import Instruction
from meshscope.readers.lint.states import (
    MIXED,
    REPLICATED,
    SUMS,
    Double,
    Factors,
    Value,
    unknown,
)

Mark = Literal["seen", "used", "undone"]


class Fault(StrEnum):
    """What a finding says."""

    MISSING = "missing_reduction"
    DOUBLE = "double_reduction"
    COUNTED = "replicated_counted_twice"
    GROUPS = "wrong_groups"
    CONSTANT = "constant_collective"
    GATHERED = "gather_of_replicated"
    PARTS = "sum_of_parts"


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
    """The notes about a program; `is_noting` is false while a loop is followed before its values settle."""

    factors: Factors
    is_noting: bool = True
    notes: dict[tuple[Fault, str, tuple[int, ...]], Note] = field(default_factory=dict)
    reasons: dict[str, set[str]] = field(default_factory=dict)  # of instructions that are unknown
    _missing: dict[tuple[tuple[int, ...], bool], frozenset[Instruction]] = field(
        default_factory=dict
    )
    _doubles: dict[Double, set[Mark]] = field(default_factory=dict)

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
        if self.is_noting and (known is None or (is_certain and not known.is_certain)):
            self.notes[key] = Note(fault, is_certain, at, tuple(factors), origins)

    def missing(
        self,
        at: Instruction,
        factors: Sequence[int],
        sums: frozenset[Instruction],
        *,
        is_certain: bool,
    ) -> None:
        """A partial sum is used as if it were whole; what follows from it is no other fault."""
        place = (tuple(factors), is_certain)
        known = self._missing.get(place, frozenset())
        certain = self._missing.get((tuple(factors), True), frozenset())
        if factors and self.is_noting and not sums & (known | certain):
            self._missing[place] = known | sums
            doubtful = [
                key
                for key, note in self.notes.items()
                if key[0] is Fault.MISSING and key[2] == place[0] and note.origins & sums
            ]
            for key in doubtful if is_certain else ():
                if not self.notes[key].is_certain:
                    del self.notes[key]
            self.note(Fault.MISSING, at, factors, sums, is_certain=is_certain)

    def misused(self, at: Instruction, value: Value) -> list[int]:
        """A value is used where only a whole one may be; returns the factors over which it is a partial sum."""
        sums = [f for f, held in enumerate(value.held) if held in SUMS]
        is_certain = any(value.held[f] == MIXED for f in sums)
        self.missing(at, sums, value.sums, is_certain=is_certain)
        return sums

    def mark(self, doubles: Iterable[Double], what: Mark = "seen") -> None:
        """Sums of equal copies: used where their scale matters, or undone by a division by the number of copies."""
        for double in doubles if self.is_noting else ():
            self._doubles.setdefault(double, set()).add(what)

    def close(self) -> None:
        """Notes the sums of equal copies: certain where a scale matters, none where the scale is undone."""
        for double, marks in self._doubles.items():
            if "used" in marks or "undone" not in marks:
                fault = Fault.GROUPS if double.is_part else Fault.DOUBLE
                at, factors = double.instruction, double.factors
                self.note(fault, at, factors, is_certain="used" in marks)

    def unknown(self, dims: tuple[int, ...], reason: str) -> Value:
        """A value that is not followed."""
        return unknown(dims, len(self.factors.all), reason)

    def replicated(self, dims: tuple[int, ...], constant: float | None = None) -> Value:
        """A value that is equal everywhere."""
        held = (REPLICATED,) * len(self.factors.all)
        return Value(dims=dims, held=held, constant=constant, is_plain=True)
