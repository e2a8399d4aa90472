"""Reads one plane of an XPlane profile into tables of lines, kinds of events, and events."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from meshscope.readers.profile.events import N_AT_ONCE, ProfileLine, events_of, origin_ns
from meshscope.readers.profile.source import ProfileBytes, check_limit
from meshscope.readers.profile.stats import PREFIX, Stat, StatTable, StatTexts, expect
from meshscope.readers.profile.wire import (
    SPAN,
    VARINT,
    Ints,
    Message,
    Spans,
    WireColumn,
    columns,
)

MAX_LINES = 1_000_000

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


def plane_of(file: ProfileBytes, start: int, end: int) -> Plane:
    """Reads the plane in the bytes [start, end)."""
    message = Message(file.data, start, end)
    check_limit(file.last_text(message, 2), "lines", len(message.spans(3)), MAX_LINES)
    lines: list[ProfileLine] = []
    for at in zip(*message.spans(3).chunk(), strict=True):
        lines.append(ProfileLine(file, *map(int, at)))
        file.release()
    names, texts = _stat_names(file, message.spans(5)), StatTexts()
    kinds = _kinds(file, message.spans(4), names, texts)
    events = events_of(file, lines, names=names, texts=texts)
    kinds = _with_unknown_kinds(kinds, events["id"])
    by_id = kinds.select("id", "kind").unique("id", keep="last")
    kind = events.select("id").join(by_id, on="id", how="left", maintain_order="left")["kind"]
    return Plane(
        name=file.last_text(message, 2),
        origin_ns=origin_ns(lines),
        stats=_plane_stats(file, message.spans(6), names),
        lines=_line_table(lines),
        kinds=kinds,
        events=events.drop("id").insert_column(1, kind),
    )


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
) -> pl.DataFrame:
    """Ids, names and shared stats of the kinds of events."""
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
    return table.with_columns(pl.Series("id", idents), *stats.series())


def _put_texts(file: ProfileBytes, column: WireColumn, labels: list[str]) -> None:
    spans = zip(column.rows.tolist(), column.starts.tolist(), column.ends.tolist(), strict=True)
    for row, start, end in spans:
        labels[row] = file.text(start, end)


def _with_unknown_kinds(kinds: pl.DataFrame, idents: pl.Series) -> pl.DataFrame:
    """The kinds, and a row for each id of an event that the plane does not describe."""
    unknown = idents.unique(maintain_order=True).to_frame().join(kinds, on="id", how="anti")
    rows = unknown.with_row_index("kind", len(kinds)).with_columns(
        ("unknown kind " + pl.col("id").cast(pl.String)).alias("name")
    )
    return pl.concat([kinds, rows], how="diagonal")


def _plane_stats(file: ProfileBytes, spans: Spans, names: dict[int, str]) -> dict[str, Stat]:
    table = StatTable(names, 1, texts=StatTexts(), wanted=None)
    starts, ends = spans.chunk()
    table.take(file.data, file.view, np.zeros(len(starts), np.int64), (starts, ends))
    return {series.name.removeprefix(PREFIX): series[0] for series in table.series()}
