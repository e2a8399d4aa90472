"""Matches the collectives of two event tables and gives each match a verdict.

Rows match by meaning, never by opcode. A match consumes the counts of both rows, so that nothing is
compared twice or dropped: a row without a match is `missing` (left only) or `extra` (right only).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from meshscope.analysis.totals import without_place
from meshscope.errors import read_only
from meshscope.events.collective import REMATERIALIZATION, Collective, Groups
from meshscope.events.enums import Kind, Part, Phase
from meshscope.units import format_shape


class Verdict(StrEnum):
    """How a collective of the left table compares with its match in the right one.

    The values are for JSON; `reports.words` has the labels for readers.
    """

    EQUAL = "equal"
    MORE_BYTES = "costlier"  # same meaning; the right opcode sends more bytes
    FEWER_BYTES = "cheaper"  # same meaning; the right opcode sends fewer bytes
    CHANGED = "changed"  # another kind, shape, axis, layer or part
    MISSING = "missing"  # only left
    EXTRA = "extra"  # only right


UNKNOWN = "?"
POINT_TO_POINT = frozenset({Kind.PERMUTE, Kind.SEND, Kind.RECV})
_REDUCTIONS = frozenset({Kind.ALL_REDUCE, Kind.REDUCE_SCATTER})  # closer than other kinds
SAME_MEANING = frozenset({Verdict.EQUAL, Verdict.MORE_BYTES, Verdict.FEWER_BYTES})


class Agreement(StrEnum):
    """How far two tables agree as a whole."""

    EQUAL = "equal"
    SAME_MEANING = "same meaning"  # the same collectives, some with other wire bytes
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A verdict on equal collectives of one or more layers.

    `left` and `right` represent all of them, with `count` 1 and no layer. `count` is the number of
    executions in one step of the phase over all `layers`, the same on both sides.
    """

    verdict: Verdict
    layers: tuple[int, ...]
    count: int
    left: Collective | None
    right: Collective | None
    note: str | None = None

    @property
    def shown(self) -> Collective:
        """The right row, or the left row of a missing collective."""
        row = self.right or self.left
        assert row is not None
        return row


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All matches of two tables, in the order of phase and part."""

    matches: tuple[Match, ...]

    @property
    def agreement(self) -> Agreement:
        """The verdict on the two tables as a whole."""
        if self.is_exact:
            return Agreement.EQUAL
        return Agreement.SAME_MEANING if self.is_same_meaning else Agreement.DIFFERENT

    @property
    def is_exact(self) -> bool:
        """Whether every collective has an equal match with the same wire bytes."""
        return all(match.verdict is Verdict.EQUAL for match in self.matches)

    @property
    def is_same_meaning(self) -> bool:
        """Whether every collective has a match of the same meaning, whatever its wire bytes."""
        return all(match.verdict in SAME_MEANING for match in self.matches)

    def with_verdict(self, verdict: Verdict, phase: Phase | None) -> list[Match]:
        """The matches of this verdict in this phase."""
        return [m for m in self.matches if m.verdict is verdict and m.shown.phase is phase]

    @property
    def phases(self) -> list[Phase | None]:
        """The phases of the matches, in order of time; None last."""
        return list(dict.fromkeys(match.shown.phase for match in self.matches))


def left_rows(matches: Iterable[Match]) -> list[Collective]:
    """The left rows of these matches, each with the count of its match."""
    return [replace(m.left, count=m.count) for m in matches if m.left is not None]


def right_rows(matches: Iterable[Match]) -> list[Collective]:
    """The right rows of these matches, each with the count of its match."""
    return [replace(m.right, count=m.count) for m in matches if m.right is not None]


def compare(left: Iterable[Collective], right: Iterable[Collective]) -> Comparison:
    """The full outer join of two tables; exact matches take precedence over looser ones."""
    ours = [_Open(row=row, n_open=row.count, position=i) for i, row in enumerate(left)]
    theirs = [
        _Open(row=row, n_open=row.count, position=i) for i, row in enumerate(right, len(ours))
    ]
    pieces = [piece for key in _PASSES for piece in _pair(ours, theirs, key)]
    pieces += [(entry, None, entry.n_open) for entry in ours]
    pieces += [(None, entry, entry.n_open) for entry in theirs]
    return Comparison(matches=_gathered(pieces))


@dataclass(slots=True, kw_only=True)
class _Open:
    row: Collective
    n_open: int
    position: int


_Piece = tuple[_Open | None, _Open | None, int]  # left, right, and their common count


def _place(row: Collective) -> tuple[Hashable, ...]:
    return (row.phase, row.stage, row.layer, row.part)


def _meaning(row: Collective) -> tuple[Hashable, ...]:
    """Kind, axis, groups, dtype and payload, regardless of the shape of the payload."""
    groups = _canonical(row.groups, is_ordered=row.kind in POINT_TO_POINT)
    return (row.kind, row.axis, groups, row.dtype, row.payload_bytes)


# Keys from exact to loose. Each pass matches the rows that earlier passes left over.
_Key = Callable[[Collective], tuple[Hashable, ...]]
_PASSES: tuple[_Key, ...] = (
    lambda row: (*_place(row), *_meaning(row), row.shape),
    lambda row: (*_place(row), *_meaning(row)),  # the same array in another shape
    lambda row: (row.phase, row.layer, *_meaning(row)),  # in another part of the layer
    lambda row: (*_place(row), row.kind, row.axis, row.payload_bytes),
    lambda row: (*_place(row), row.axis, row.payload_bytes, row.kind in _REDUCTIONS),
    lambda row: (*_place(row), row.axis, row.payload_bytes),
    lambda row: (*_place(row), row.kind, row.axis, row.dtype),
    lambda row: (*_place(row), row.kind, row.axis, row.shape),
    lambda row: (*_place(row), row.kind, row.payload_bytes),
    lambda row: (row.phase, *_meaning(row)),  # in another or an unknown layer
)


def _pair(left: Iterable[_Open], right: Iterable[_Open], key: _Key) -> Iterator[_Piece]:
    waiting: dict[tuple[Hashable, ...], list[_Open]] = {}
    # A collective that the compiler repeats is the surplus, so it is matched last.
    ordered = sorted(right, key=lambda e: e.row.inserted_by == REMATERIALIZATION)
    for entry in reversed(ordered):
        if entry.n_open:
            waiting.setdefault(key(entry.row), []).append(entry)
    for entry in left:
        partners = waiting.get(key(entry.row), []) if entry.n_open else []
        while entry.n_open and partners:
            partner = partners[-1]
            count = min(entry.n_open, partner.n_open)
            yield entry, partner, count
            entry.n_open -= count
            partner.n_open -= count
            if not partner.n_open:
                partners.pop()


def _gathered(pieces: Iterable[_Piece]) -> tuple[Match, ...]:
    """Merges pieces that differ only in their layer into one Match, in the order of phase and part."""
    members: dict[Match, list[tuple[list[_Open], int]]] = {}
    for *sides, count in pieces:
        left, right = (entry and entry.row for entry in sides)
        if not count:
            continue
        shared = Match(
            verdict=_verdict(left, right),
            layers=(),
            count=0,
            left=left and without_place(left),
            right=right and without_place(right),
            note=_note(left, right) if left and right else None,
        )
        members.setdefault(shared, []).append(([one for one in sides if one is not None], count))
    phases, parts = [*Phase, None], [*Part, None]

    def rank(shared: Match) -> tuple[int, int, int]:
        row = shared.left or shared.shown
        first = min(entry.position for entries, _ in members[shared] for entry in entries)
        return (phases.index(row.phase), parts.index(row.part), first)

    matches: list[Match] = []
    for shared in sorted(members, key=rank):
        # The layer of the left row, else of the right row.
        known = ([n for e in of if (n := e.row.layer) is not None] for of, _ in members[shared])
        layers = tuple(sorted({of_piece[0] for of_piece in known if of_piece}))
        matches.append(replace(shared, layers=layers, count=sum(n for _, n in members[shared])))
    return tuple(matches)


def _verdict(left: Collective | None, right: Collective | None) -> Verdict:
    if right is None:
        return Verdict.MISSING
    if left is None:
        return Verdict.EXTRA
    if _place(left) != _place(right) or _meaning(left) != _meaning(right):
        return Verdict.CHANGED
    if left.wire_bytes is None or right.wire_bytes is None or left.wire_bytes == right.wire_bytes:
        return Verdict.EQUAL
    return Verdict.MORE_BYTES if right.wire_bytes > left.wire_bytes else Verdict.FEWER_BYTES


def _note(left: Collective, right: Collective) -> str | None:
    pairs: list[tuple[str | None, str | None]] = [(left.kind, right.kind), (left.axis, right.axis)]
    if (left.dtype, left.payload_bytes) != (right.dtype, right.payload_bytes):
        before, after = (f"{r.dtype or UNKNOWN}{format_shape(r.shape)}" for r in (left, right))
        pairs.append((before, after))
    notes = [f"{a or UNKNOWN} -> {b or UNKNOWN}" for a, b in pairs if a != b]
    if not notes and _meaning(left) != _meaning(right):
        notes.append("different devices in the groups")
    if left.part is not right.part:
        notes.append(f"in {right.part or 'an unknown part'}, not {left.part or 'an unknown part'}")
    elif left.layer != right.layer:
        notes.append("in an unknown layer" if right.layer is None else "in another layer")
    elif left.stage != right.stage:
        notes.append("in another stage")
    if not notes and right.shape is not None and left.shape != right.shape:
        return f"written as {format_shape(right.shape)}"
    return "; ".join(notes) or None


@cache
def _canonical(groups: Groups, *, is_ordered: bool) -> Groups:
    """The groups in canonical order, so that equal groups compare equal; pairs keep their direction."""
    return tuple(sorted(group if is_ordered else tuple(sorted(group)) for group in groups))
