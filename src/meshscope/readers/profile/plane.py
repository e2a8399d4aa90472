"""Reads one plane of an XPlane profile into tables of lines, kinds of events, and events."""

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from meshscope.readers.profile.events import N_AT_ONCE, KindIndex, ProfileLine, events_of, origin_ns
from meshscope.readers.profile.source import ProfileBytes, check_limit
from meshscope.readers.profile.stats import PREFIX, Stat, StatTable, StatTexts, expect
from meshscope.readers.profile.wire import (
    SPAN,
    VARINT,
    Ints,
    SpanList,
    Spans,
    WireColumn,
    columns,
    field_at,
)

MAX_LINES = 1_000_000

# Tags of repeated fields that are read in runs (field number << 3 | SPAN).
_EVENTS, _EVENT_METADATA, _STAT_METADATA, _PLANE_STATS = 0x22, 0x22, 0x2A, 0x32
_ENTRY_WIRES = {1: VARINT, 2: SPAN}
_METADATA_WIRES = {1: VARINT, 2: SPAN, 3: SPAN, 4: SPAN, 5: SPAN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One plane: a chip, a core, or a host.

    `lines` has line, id, name, n_events, timestamp_ns (as written). `kinds` has kind, id, name,
    display_name and the stats that all events of the kind share. `events` has line, kind, start_ps
    (from origin_ns), dur_ps and the stats of single events. Stats are in columns `stat.NAME`.
    """

    name: str
    origin_ns: int
    stats: dict[str, Stat]
    lines: pl.DataFrame
    kinds: pl.DataFrame
    events: pl.DataFrame


@dataclass(slots=True)
class _Parts:
    """Byte ranges of the parts of a plane."""

    name: str = ""
    lines: list[ProfileLine] = field(default_factory=list[ProfileLine])
    event_metadata: SpanList = field(default_factory=SpanList)
    stat_metadata: SpanList = field(default_factory=SpanList)
    stats: SpanList = field(default_factory=SpanList)


def plane_of(file: ProfileBytes, start: int, end: int) -> Plane:
    """Reads the plane in the bytes [start, end)."""
    parts = _parts(file, start, end)
    names = _stat_names(file, parts.stat_metadata.spans())
    texts = StatTexts()
    idents, kinds = _kinds(file, parts.event_metadata.spans(), names, texts)
    index, origin = KindIndex(idents), origin_ns(parts.lines)
    lines = _line_table(parts.lines)
    events = events_of(file, parts.lines, names=names, texts=texts, kinds=index)
    return Plane(
        name=parts.name,
        origin_ns=origin,
        stats=_plane_stats(file, parts.stats.spans(), names),
        lines=lines,
        kinds=_with_unknown_kinds(kinds, index.unknown),
        events=events,
    )


def _parts(file: ProfileBytes, start: int, end: int) -> _Parts:
    parts, position = _Parts(), start
    while position < end:
        before = position
        position = parts.event_metadata.take_run(file.data, position, end, _EVENT_METADATA)
        position = parts.stat_metadata.take_run(file.data, position, end, _STAT_METADATA)
        position = parts.stats.take_run(file.data, position, end, _PLANE_STATS)
        if position > before:
            continue
        part = field_at(file.data, position, end)
        expect(part.number, part.wire, {2: SPAN, 3: SPAN}, position)
        if part.number == 2:
            parts.name = file.text(part.value, part.end)
        elif part.number == 3:
            parts.lines.append(_line(file, part.value, part.end))
            file.release()
            check_limit(parts.name, "lines", len(parts.lines), MAX_LINES)
        position = part.end
    return parts


def _line(file: ProfileBytes, start: int, end: int) -> ProfileLine:
    line, events, position = ProfileLine(), SpanList(), start
    while position < end:
        after = events.take_run(file.data, position, end, _EVENTS)
        if after == position:
            part = field_at(file.data, position, end)
            expect(part.number, part.wire, {1: VARINT, 2: SPAN, 3: VARINT, 11: SPAN}, position)
            if part.number == 1:
                line.ident = _signed(part.value)
            elif part.number == 2:
                line.name = file.text(part.value, part.end)
            elif part.number == 3:
                line.timestamp_ns = _signed(part.value)
            elif part.number == 11:
                line.name = file.text(part.value, part.end) or line.name
            after = part.end
        position = after
    line.events = events.spans()
    return line


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _line_table(lines: list[ProfileLine]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "line": pl.Series(range(len(lines)), dtype=pl.UInt32),
            "id": pl.Series([line.ident for line in lines], dtype=pl.Int64),
            "name": pl.Series([line.name for line in lines], dtype=pl.String),
            "n_events": pl.Series([len(line.events) for line in lines], dtype=pl.UInt32),
            "timestamp_ns": pl.Series([line.timestamp_ns for line in lines], dtype=pl.Int64),
        }
    )


def _entries(file: ProfileBytes, spans: Spans, first: int) -> tuple[Ints, Ints, Ints]:
    """Keys of a chunk of map entries, and the byte ranges of their values."""
    starts, ends = spans.chunk(first, first + N_AT_ONCE)
    keys = np.zeros(len(starts), np.int64)
    value_starts, value_ends = ends.copy(), ends.copy()
    for column in columns(file.view, starts, ends):
        expect(column.number, column.wire, _ENTRY_WIRES, int(starts[column.rows[0]]))
        if column.number == 1:
            keys[column.rows] = column.starts
        elif column.number == 2:
            value_starts[column.rows], value_ends[column.rows] = column.starts, column.ends
    return keys, value_starts, value_ends


def _stat_names(file: ProfileBytes, spans: Spans) -> dict[int, str]:
    """Names of stats by id; stats may also refer to them as text values."""
    names: dict[int, str] = {}
    for first in range(0, len(spans), N_AT_ONCE):
        keys, starts, ends = _entries(file, spans, first)
        for column in columns(file.view, starts, ends):
            if column.number == 2 and column.wire == SPAN:
                at = zip(keys[column.rows], column.starts, column.ends, strict=True)
                names |= {int(key): file.text(int(start), int(end)) for key, start, end in at}
    return names


def _kinds(
    file: ProfileBytes, spans: Spans, names: dict[int, str], texts: StatTexts
) -> tuple[Ints, pl.DataFrame]:
    """Ids of the kinds of events, and their names and shared stats."""
    idents = np.zeros(len(spans), np.int64)
    stats = StatTable(names, len(spans), texts=texts, wanted=None)
    blocks: list[pl.DataFrame] = []
    for first in range(0, len(spans), N_AT_ONCE):
        keys, starts, ends = _entries(file, spans, first)
        idents[first : first + len(keys)] = keys
        labels = {2: [""] * len(keys), 4: [""] * len(keys)}
        for column in columns(file.view, starts, ends):
            expect(column.number, column.wire, _METADATA_WIRES, int(starts[column.rows[0]]))
            if column.number in labels:
                _put_texts(file, column, labels[column.number])
            elif column.number == 5:
                ranges = (column.starts, column.ends)
                stats.take(file.data, file.view, column.rows + first, ranges)
        blocks.append(pl.DataFrame({"name": labels[2], "display_name": labels[4]}))
    empty = pl.DataFrame(schema={"name": pl.String, "display_name": pl.String})
    table = pl.concat([empty, *blocks]).with_row_index("kind")
    return idents, table.with_columns(pl.Series("id", idents), *stats.series())


def _put_texts(file: ProfileBytes, column: WireColumn, labels: list[str]) -> None:
    spans = zip(column.rows.tolist(), column.starts.tolist(), column.ends.tolist(), strict=True)
    for row, start, end in spans:
        labels[row] = file.text(start, end)


def _with_unknown_kinds(kinds: pl.DataFrame, unknown: list[int]) -> pl.DataFrame:
    """The kinds, and a row for each id that the plane does not describe."""
    rows = pl.DataFrame(
        {
            "kind": pl.Series(range(len(kinds), len(kinds) + len(unknown)), dtype=pl.UInt32),
            "name": pl.Series([f"unknown kind {ident}" for ident in unknown], dtype=pl.String),
            "id": pl.Series(unknown, dtype=pl.Int64),
        }
    )
    return pl.concat([kinds, rows], how="diagonal")


def _plane_stats(file: ProfileBytes, spans: Spans, names: dict[int, str]) -> dict[str, Stat]:
    table = StatTable(names, 1, texts=StatTexts(), wanted=None)
    starts, ends = spans.chunk(0, len(spans))
    table.take(file.data, file.view, np.zeros(len(starts), np.int64), (starts, ends))
    return {series.name.removeprefix(PREFIX): series[0] for series in table.series()}
