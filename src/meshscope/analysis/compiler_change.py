"""What two compilers make of one program, beyond its collectives and times: memory, and how collectives run."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from meshscope.analysis.comparison import COMPILERS, ExperimentDifference, Side
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.serialize import picked

MEMORY_FIELDS = ("total_bytes", "temp_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How collectives run: `kind` over `axis` as `opcode`, by `algorithm` (emitter and strategy)."""

    phase: Phase | None
    kind: str
    axis: str | None
    opcode: str
    is_async: bool | None
    algorithm: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormChange:
    """The executions in one step of a form that only one side has, or has more often."""

    form: Form
    left: int
    right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerChange:
    """One program under two compilers. Bytes are (left, right) on one device; None if unknown."""

    total_bytes: tuple[int | None, int | None]
    temp_bytes: tuple[int | None, int | None]
    forms: tuple[FormChange, ...]


def compiler_change(
    left: Side, right: Side, differences: Iterable[ExperimentDifference]
) -> CompilerChange | None:
    """The change; None unless the sides are compiled and differ in the versions of the compiler alone."""
    names = {difference.name for difference in differences}
    is_compiled = left.source is right.source is Source.COMPILED
    if not is_compiled or not names or not names <= set(COMPILERS):
        return None
    memories = [side.run.memory.get(Source.COMPILED) for side in (left, right)]
    values = [
        dict.fromkeys(MEMORY_FIELDS) if memory is None else picked(memory, *MEMORY_FIELDS)
        for memory in memories
    ]
    return CompilerChange(
        **{name: (values[0][name], values[1][name]) for name in MEMORY_FIELDS},
        forms=form_changes(left.run.rows_of(left.source), right.run.rows_of(right.source)),
    )


def form_changes(left: Iterable[Collective], right: Iterable[Collective]) -> tuple[FormChange, ...]:
    """The forms whose number of executions in a step differs."""
    before, after = _forms(left), _forms(right)
    return tuple(
        FormChange(form=form, left=before[form], right=after[form])
        for form in dict.fromkeys((*before, *after))
        if before[form] != after[form]
    )


def _forms(rows: Iterable[Collective]) -> Counter[Form]:
    forms: Counter[Form] = Counter()
    for row in rows:
        names = ("phase", "axis", "opcode", "is_async", "algorithm")
        forms[Form(kind=row.kind.value, **picked(row, *names))] += row.count
    return forms
