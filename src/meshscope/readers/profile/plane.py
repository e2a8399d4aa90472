"""Reads one plane of an XPlane profile into tables of lines, kinds of events, and events.

Times are integer picoseconds from the origin of the plane, as in the file: a Unix time in floating
point seconds would lose digits.
"""

import mmap
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.readers.profile.stats import PREFIX, Stat, StatColumn, StatTable, StatTexts, expect
from meshscope.readers.profile.wire import (
    SPAN,
    VARINT,
    Bytes,
    Data,
    Ints,
    Message,
    Spans,
    WireColumn,
    WireError,
    columns,
)

# The largest protobuf message: https://protobuf.dev/programming-guides/proto-limits
MAX_BYTES = 2**31
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class ProfileBytes:
    """The bytes of a profile, and a NumPy view of them.

    `wanted` lists the stats of events to keep; None keeps all.
    """

    data: Data
    view: Bytes
    wanted: Collection[str] | None

    def text(self, start: int, end: int) -> str:
        """The text in [start, end); invalid UTF-8 becomes replacement characters."""
        return self.data[start:end].decode(errors="replace")

    def release(self) -> None:
        """Drops mapped pages from this process; the operating system may keep them cached."""
        if isinstance(self.data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)


def read_bytes(path: Path, wanted: Collection[str] | None) -> ProfileBytes:
    """Opens the profile at `path`; TraceError if it cannot be read."""
    try:
        data = _bytes_of(path)
    except (OSError, zlib.error, EOFError) as error:
        raise TraceError(
            f"{path}: cannot be read ({error}). Give the path of a file that ends in .xplane.pb or "
            ".xplane.pb.gz, as jax.profiler writes it; copy it again if it was copied."
        ) from error
    return ProfileBytes(data, np.frombuffer(data, np.uint8), wanted)


def _bytes_of(path: Path) -> Data:
    with path.open("rb") as file:
        head = file.read(2)
        n_bytes = file.seek(0, 2)
        if not n_bytes:
            raise EOFError("it is empty")
        check_limit(path, "bytes", n_bytes, MAX_BYTES)
        if head == GZIP_MAGIC:
            file.seek(0)
            return _unpacked(path, iter(lambda: file.read(1 << 20), b""))
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _unpacked(path: Path, blocks: Iterator[bytes]) -> bytearray:
    """Unpacks up to a limit, so that a small hostile file cannot fill the memory."""
    unpacked, stream = bytearray(), zlib.decompressobj(wbits=31)
    for block in blocks:
        rest = block
        while rest and not stream.eof:
            unpacked += stream.decompress(rest, 1 << 24)
            rest = stream.unconsumed_tail
            check_limit(path, "bytes, unpacked", len(unpacked), MAX_BYTES)
    if not stream.eof:
        raise EOFError("the gzip stream ends early")
    return unpacked


def check_limit(path: Path | str, unit: str, n: int, limit: int) -> None:
    """TraceError if a count in the profile exceeds its limit."""
    if n > limit:
        raise TraceError(
            f"{path}: has {n:,} {unit}, more than the limit of {limit:,}. "
            "Profile fewer steps, or fewer hosts in one file."
        )


MAX_EVENTS = 50_000_000  # of one plane; their columns take about 2 GB
N_AT_ONCE = 32_768  # events decoded together; their temporaries take about 10 MB
LARGEST_PS = 2**61  # 26 days; sums of two such times still fit 64 bits

_WIRES = {1: VARINT, 2: VARINT, 3: VARINT, 4: SPAN, 5: VARINT}


class ProfileLine:
    """An XLine, whose events are not yet decoded."""

    def __init__(self, file: ProfileBytes, start: int, end: int) -> None:
        message = Message(file.data, start, end)
        self.ident = message.number(1)
        self.name = message.text(11) or message.text(2)
        self.timestamp_ns = message.number(3)
        self.events = message.spans(4)


def origin_ns(lines: list[ProfileLine]) -> int:
    """The earliest timestamp of a line with events, in ns; 0 without events."""
    return min((line.timestamp_ns for line in lines if len(line.events)), default=0)


def events_of(
    file: ProfileBytes,
    lines: list[ProfileLine],
    *,
    names: dict[int, str],
    texts: StatTexts,
) -> pl.DataFrame:
    """line, id (of the kind), start_ps (from the origin), dur_ps and stats of all events."""
    n_events = sum(len(line.events) for line in lines)
    check_limit("profile", "events on one plane", n_events, MAX_EVENTS)
    events = _Events(n_events, StatTable(names, n_events, texts=texts, wanted=file.wanted))
    origin, first = origin_ns(lines), 0
    for index, line in enumerate(lines):
        last = first + len(line.events)
        for at in range(0, len(line.events), N_AT_ONCE):
            events.take(file, line.events.chunk(at, at + N_AT_ONCE), first + at)
            file.release()
        events.line[first:last] = index
        if first < last:
            events.start_ps[first:last] += _base_ps(line, origin)
        first = last
    return events.frame()


def _base_ps(line: ProfileLine, origin: int) -> int:
    base_ps = (line.timestamp_ns - origin) * 1000
    if base_ps > LARGEST_PS:
        raise WireError(f"line {line.name!r} starts weeks after another line of its plane", 0)
    return base_ps


class _Events:
    def __init__(self, n_events: int, stats: StatTable) -> None:
        self.line = np.zeros(n_events, np.uint32)
        self.ident = np.zeros(n_events, np.int64)
        self.start_ps = np.zeros(n_events, np.int64)
        self.dur_ps = np.zeros(n_events, np.int64)
        self._n_occurrences = StatColumn(n_events)
        self._stats = stats

    def take(self, file: ProfileBytes, spans: tuple[Ints, Ints], first: int) -> None:
        """Reads the events in these byte ranges into rows from `first` on."""
        for column in columns(file.view, *spans):
            expect(column.number, column.wire, _WIRES, int(spans[0][column.rows[0]]))
            if column.number == 1:
                self.ident[column.rows + first] = column.starts
            elif column.number == 4:
                ranges = (column.starts, column.ends)
                self._stats.take(file.data, file.view, column.rows + first, ranges)
            else:
                self._put(column, column.rows + first, spans[0])

    def _put(self, column: WireColumn, rows: Ints, starts: Ints) -> None:
        if column.number == 2:
            self.start_ps[rows] = _checked(column, starts)
        elif column.number == 3:
            self.dur_ps[rows] = _checked(column, starts)
        elif column.number == 5:
            self._n_occurrences.put(rows, 1, column.starts)

    def frame(self) -> pl.DataFrame:
        """The events as a table, with `n_occurrences` if the profile counts instead of timing."""
        table = pl.DataFrame(
            {
                "line": self.line,
                "id": self.ident,
                "start_ps": self.start_ps,
                "dur_ps": self.dur_ps,
            }
        )
        counts = self._n_occurrences
        counted = [counts.series("n_occurrences", StatTexts())] if counts.forms.any() else []
        return table.with_columns(*counted, *self._stats.series())


def _checked(column: WireColumn, starts: Ints) -> Ints:
    """Times in ps; WireError if one is so large that sums could overflow."""
    times = column.starts
    absurd = (times > LARGEST_PS) | (times < -LARGEST_PS)
    if absurd.any():
        first = int(starts[column.rows[np.argmax(absurd)]])
        raise WireError("an event lasts for weeks", first)
    return times


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
    check_limit(message.text(2), "lines", len(message.spans(3)), MAX_LINES)
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
        name=message.text(2),
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
