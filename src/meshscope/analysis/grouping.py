"""Groups collectives that differ only in their layer, for text and JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from meshscope.events.collective import Collective

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Collectives of one or more layers that are equal in everything else.

    In `row`, `count` is the number of executions in one step of the phase over all `layers`, and `layer`
    and `hlo_name` are null if the members differ in them. `layers` is empty outside layers. `dur_s` and
    `exposed_s` are means over all executions, null if one is unknown; `start_s` is the earliest start.
    """

    row: Collective
    layers: tuple[int, ...]


def grouped(rows: Iterable[Collective]) -> list[Group]:
    """The groups of the rows, in the order of their first members."""
    members: dict[tuple[Collective, bool], list[Collective]] = {}
    for row in rows:
        members.setdefault((without_place(row), row.layer is None), []).append(row)
    return [_group(shared, rows_of_key) for (shared, _), rows_of_key in members.items()]


def without_place(row: Collective) -> Collective:
    """The row without layer, instruction name, count and times, which differ within a group."""
    untimed = replace(row, start_s=None, dur_s=None, exposed_s=None, time_basis=None)
    return replace(untimed, layer=None, hlo_name=None, count=1)


def _group(shared: Collective, members: Sequence[Collective]) -> Group:
    row = replace(
        shared,
        layer=_common([member.layer for member in members]),
        hlo_name=_common([member.hlo_name for member in members]),
        count=sum(member.count for member in members),
        time_basis=_common([member.time_basis for member in members]),
        start_s=min((m.start_s for m in members if m.start_s is not None), default=None),
        dur_s=_mean(members, [member.dur_s for member in members]),
        exposed_s=_mean(members, [member.exposed_s for member in members]),
    )
    return Group(row=row, layers=tuple(sorted({m.layer for m in members if m.layer is not None})))


def _common(values: Sequence[T]) -> T | None:
    """The value of all members, or None if they differ."""
    return values[0] if len(set(values)) == 1 else None


def _mean(members: Sequence[Collective], seconds: Sequence[float | None]) -> float | None:
    """The mean over all executions; None if a member has no value."""
    known = [s for s in seconds if s is not None]
    n = sum(member.count for member in members)
    if len(known) < len(members) or not n:
        return None
    return sum(m.count * s for m, s in zip(members, known, strict=True)) / n


def layer_ranges(layers: Sequence[int]) -> str:
    """Sorted layer indices as ranges, e.g. `0-31, 40`; empty without layers."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ", ".join("-".join(map(str, run)) for run in runs)
