"""Reads one plane of an XPlane profile into tables of kinds of events and of events.

Times are integer picoseconds from the origin of the plane, as in the file: a Unix time in floating
point seconds would lose digits. The stats in STATS are kept as columns: numbers use the narrowest
integer type that fits, texts become enumerations. If an event has two stats of one name, the last one counts.
"""

import gzip
import mmap
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.errors import TraceError
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
    alike,
    columns,
)

# The largest protobuf message: https://protobuf.dev/programming-guides/proto-limits
MAX_BYTES = 2**31
MAX_EVENTS = 50_000_000  # of one plane; their columns take about 2 GB
MAX_LINES = 1_000_000
N_AT_ONCE = 32_768  # events decoded together; their temporaries take about 10 MB
LARGEST_PS = 2**61  # 26 days; sums of two such times still fit 64 bits
GZIP_MAGIC = b"\x1f\x8b"
PREFIX = "stat."  # of columns with stats
STATS = frozenset(  # on events, kinds and planes; profilers write many more
    {"hlo_op", "hlo_module", "hlo_category", "program_id", "run_id", "device_ordinal", "step_num"}
    | {"source", "graph_key", "device_type_string", "profile_start_time"}
)


@dataclass(frozen=True, slots=True)
class ProfileBytes:
    """The bytes of a profile, and a NumPy view of them."""

    data: Data
    view: Bytes

    def text(self, start: int, end: int) -> str:
        """The text in [start, end); invalid UTF-8 becomes replacement characters."""
        return self.data[start:end].decode(errors="replace")

    def release(self) -> None:
        """Drops mapped pages from this process; the operating system may keep them cached."""
        if isinstance(self.data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)


def read_bytes(path: Path) -> ProfileBytes:
    """Opens the profile at `path`; TraceError if it cannot be read."""
    try:
        data = _bytes_of(path)
    except (OSError, zlib.error, EOFError) as error:
        raise TraceError(
            f"{path}: cannot be read ({error}). Give the path of a file that ends in .xplane.pb or "
            ".xplane.pb.gz, as jax.profiler writes it; copy it again if it was copied."
        ) from error
    return ProfileBytes(data, np.frombuffer(data, np.uint8))


def _bytes_of(path: Path) -> Data:
    """The bytes, unpacked up to a limit, so that a small hostile file cannot fill the memory."""
    with path.open("rb") as file:
        head = file.read(2)
        n_bytes = file.seek(0, 2)
        if not n_bytes:
            raise EOFError("it is empty")
        check_limit(path, "bytes", n_bytes, MAX_BYTES)
        if head != GZIP_MAGIC:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        file.seek(0)
        try:
            unpacked = gzip.GzipFile(fileobj=file).read(MAX_BYTES + 1)
        except EOFError as error:
            raise EOFError("the gzip stream ends early") from error
        check_limit(path, "bytes, unpacked", len(unpacked), MAX_BYTES)
        return unpacked


def check_limit(path: Path | str, unit: str, n: int, limit: int) -> None:
    """TraceError if a count in the profile exceeds its limit."""
    if n > limit:
        raise TraceError(
            f"{path}: has {n:,} {unit}, more than the limit of {limit:,}. "
            "Profile fewer steps, or fewer hosts in one file."
        )


# Fields of XStat (tsl/profiler/protobuf/xplane.proto): id of the stat, then one of the values.
_STAT_ID, _UINT, _INT, _TEXT, _REF = 1, 3, 4, 5, 7  # 2 and 6, floats and bytes, are not read
_STAT_WIRES = dict.fromkeys((_STAT_ID, _UINT, _INT, _REF), VARINT) | {_TEXT: SPAN}
_TEXTUAL = {_TEXT, _REF}


class StatTexts(dict[str, int]):
    """Codes of the distinct texts of a plane, in the order of their first use."""

    def __missing__(self, text: str) -> int:
        """A new text gets the next code."""
        self[text] = code = len(self)
        return code


class _StatColumn:
    """One stat of `n_rows` events; null for events without it."""

    def __init__(self, n_rows: int) -> None:
        self.forms = np.zeros(n_rows, np.uint8)  # [n_rows] field number in XStat, 0 if missing
        self.values: NDArray[Any] = np.zeros(n_rows, np.int8)  # [n_rows] bits, or codes of texts

    def put(self, rows: Ints, form: int, values: Ints) -> None:
        """Sets the rows; widens the column if a number needs it."""
        # The smallest type of a negative number is signed, and ~v takes as many bits as v.
        bounds = (int(values.min()), int(values.max()))
        fewest = [np.min_scalar_type(min(bound, ~bound)) for bound in bounds]
        self.values = self.values.astype(np.result_type(*fewest, self.values.dtype), copy=False)
        self.values[rows] = values
        self.forms[rows] = form

    def series(self, name: str, texts: StatTexts) -> pl.Series:
        """The column: texts if one value is a text, else integers."""
        present, values = self.forms > 0, self.values
        is_text = np.isin(self.forms, list(_TEXTUAL))
        if is_text.any():
            if (is_number := present & ~is_text).any():  # among texts, numbers are texts
                values = values.astype(np.int64)
                values[is_number] = [texts[str(number)] for number in values[is_number].tolist()]
            used, codes = np.unique(values[present], return_inverse=True)
            narrow = np.zeros(len(values), np.min_scalar_type(len(used)))
            narrow[present] = codes
            every = list(texts)
            column = pl.Series(narrow).cat.to(pl.Enum([every[code] for code in used]))
        else:  # from 2^63 on, numbers are negative
            is_wide = ((self.forms == _UINT) & (values < 0)).any()
            column = pl.Series(values.astype(np.int64).view(np.uint64) if is_wide else values)
        if not present.all():
            column = pl.select(pl.when(pl.Series(present)).then(column)).to_series()
        return column.alias(name)


@dataclass(slots=True, kw_only=True)
class StatTable:
    """The stats of the events of one plane, one column per name that occurs; `names` are theirs by id."""

    file: ProfileBytes
    names: Mapping[int, str]
    n_rows: int
    texts: StatTexts
    _columns: dict[str, _StatColumn] = field(init=False, default_factory=dict[str, _StatColumn])

    def take(self, rows: Ints, starts: Ints, ends: Ints) -> None:
        """Reads the stats in these byte ranges into the rows [n] of their events."""
        stat_ids, values = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        forms, value_ends = np.zeros(len(rows), np.uint8), ends.copy()
        for column in columns(self.file.view, starts, ends, _STAT_WIRES):
            if column.number == _STAT_ID:
                stat_ids[column.rows] = column.values
            else:
                forms[column.rows] = column.number
                values[column.rows], value_ends[column.rows] = column.values, column.ends
        for stat_id, of_stat in alike(stat_ids):
            if (name := self.names.get(stat_id)) not in STATS:
                continue
            for form, index in alike(forms[of_stat]):
                if form:
                    of_form = values[of_stat][index]
                    if form in _TEXTUAL:
                        of_form = self._codes(form, of_form, value_ends[of_stat][index])
                    if name not in self._columns:
                        self._columns[name] = _StatColumn(self.n_rows)
                    self._columns[name].put(rows[of_stat][index], form, of_form)

    def _codes(self, form: int, values: Ints, ends: Ints) -> Ints:
        """The codes of texts, and of names that stats refer to."""
        texts = self.texts
        if form == _REF:
            unique, inverse = np.unique(values, return_inverse=True)
            codes = [texts[self.names.get(ref, f"text {ref}")] for ref in unique.tolist()]
            return np.array(codes, np.int64)[inverse]
        spans = zip(values.tolist(), ends.tolist(), strict=True)
        return np.array([texts[self.file.text(*span)] for span in spans], np.int64)

    def series(self) -> list[pl.Series]:
        """The columns, named `stat.NAME`; frees the source of each as it is built."""
        names = sorted(self._columns)
        return [self._columns.pop(name).series(PREFIX + name, self.texts) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One plane: a chip, a core, or a host.

    `lines` are the names of its lines. `kinds` has kind, name and the stats that all events of the kind
    share. `events` has line, kind, start_ps (from origin_ns), dur_ps and the
    stats of single events. Stats are in columns `stat.NAME`.
    """

    name: str
    origin_ns: int
    stats: dict[str, str | int]
    lines: tuple[str, ...]
    kinds: pl.DataFrame
    events: pl.DataFrame

    def lines_named(self, *names: str) -> list[int]:
        """Numbers of the lines with one of these names."""
        return [line for line, name in enumerate(self.lines) if name in names]

    def with_names(self, events: pl.DataFrame) -> pl.DataFrame:
        """These events of the plane with the names of their kinds."""
        names = self.kinds.select("kind", "name")
        return events.join(names, on="kind", how="left", maintain_order="left")


@dataclass(frozen=True, slots=True, kw_only=True)
class XSpace:
    """The profile of one host."""

    path: Path
    host: str
    planes: tuple[Plane, ...]
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class _Line(NamedTuple):
    name: str
    timestamp_ns: int
    events: Spans


def plane_of(file: ProfileBytes, start: int, end: int) -> Plane:
    """Reads the plane in the bytes [start, end)."""
    message = Message(file.data, start, end)
    check_limit(message.text(2), "lines", len(message.spans(3)), MAX_LINES)
    lines: list[_Line] = []
    for first, last in zip(*message.spans(3).chunk(), strict=True):
        line = Message(file.data, int(first), int(last))
        lines.append(_Line(line.text(11) or line.text(2), line.number(3), line.spans(4)))
        file.release()
    origin_ns = min((line.timestamp_ns for line in lines if len(line.events)), default=0)
    names, texts = _stat_names(file, message.spans(5)), StatTexts()
    kinds = _kinds(file, message.spans(4), names, texts)
    events = _events(file, lines, origin_ns, names, texts)
    unknown = events["id"].unique(maintain_order=True).to_frame().join(kinds, on="id", how="anti")
    unknown = unknown.with_columns(name="unknown kind " + pl.col("id").cast(pl.String))
    kinds = pl.concat([kinds, unknown], how="diagonal").with_row_index("kind")
    by_id = kinds.select("id", "kind").unique("id", keep="last")
    kind = events.select("id").join(by_id, on="id", how="left", maintain_order="left")["kind"]
    starts, ends = message.spans(6).chunk()
    stats = StatTable(file=file, names=names, n_rows=1, texts=StatTexts())
    stats.take(np.zeros(len(starts), np.int64), starts, ends)
    return Plane(
        name=message.text(2),
        origin_ns=origin_ns,
        stats={series.name.removeprefix(PREFIX): series[0] for series in stats.series()},
        lines=tuple(line.name for line in lines),
        kinds=kinds.drop("id"),
        events=events.drop("id").insert_column(1, kind),
    )


def _events(
    file: ProfileBytes, lines: list[_Line], origin_ns: int, names: dict[int, str], texts: StatTexts
) -> pl.DataFrame:
    """line, id (of the kind), start_ps (from the origin), dur_ps and stats of all events."""
    n_of_lines = [len(line.events) for line in lines]
    n_events = sum(n_of_lines)
    check_limit("profile", "events on one plane", n_events, MAX_EVENTS)
    stats = StatTable(file=file, names=names, n_rows=n_events, texts=texts)
    numbers = {number: np.zeros(n_events, np.int64) for number in (1, 2, 3)}
    first = 0
    for line in lines:
        base_ps = (line.timestamp_ns - origin_ns) * 1000 if len(line.events) else 0
        if base_ps > LARGEST_PS:
            raise WireError(f"line {line.name!r} starts weeks after another line of its plane")
        for at in range(0, len(line.events), N_AT_ONCE):
            starts, ends = line.events.chunk(at, at + N_AT_ONCE)
            wires = {1: VARINT, 2: VARINT, 3: VARINT, 4: SPAN}
            for column in columns(file.view, starts, ends, wires):
                rows = column.rows + (first + at)
                if column.number == 4:
                    stats.take(rows, column.values, column.ends)
                else:
                    values = column.values if column.number == 1 else _checked(column, starts)
                    numbers[column.number][rows] = values
            file.release()
        numbers[2][first : first + len(line.events)] += base_ps
        first += len(line.events)
    line_of = np.repeat(np.arange(len(lines), dtype=np.uint32), n_of_lines)
    table = {"line": line_of, "id": numbers[1], "start_ps": numbers[2], "dur_ps": numbers[3]}
    return pl.DataFrame(table).with_columns(stats.series())


def _checked(column: WireColumn, starts: Ints) -> Ints:
    """Times in ps; WireError if one is so large that sums could overflow."""
    absurd = (column.values > LARGEST_PS) | (column.values < -LARGEST_PS)
    if absurd.any():
        raise WireError("an event lasts for weeks", int(starts[column.rows[np.argmax(absurd)]]))
    return column.values


def _entries(file: ProfileBytes, spans: Spans) -> Iterator[tuple[int, Ints, Ints, Ints]]:
    """In chunks of map entries: the number of the first, their keys, and byte ranges of their values."""
    for first in range(0, len(spans), N_AT_ONCE):
        starts, ends = spans.chunk(first, first + N_AT_ONCE)
        keys = np.zeros(len(starts), np.int64)
        value_starts, value_ends = ends.copy(), ends.copy()
        for column in columns(file.view, starts, ends, {1: VARINT, 2: SPAN}):
            if column.number == 1:
                keys[column.rows] = column.values
            else:
                value_starts[column.rows], value_ends[column.rows] = column.values, column.ends
        yield first, keys, value_starts, value_ends


def _stat_names(file: ProfileBytes, spans: Spans) -> dict[int, str]:
    names: dict[int, str] = {}
    for _, keys, starts, ends in _entries(file, spans):
        for column in columns(file.view, starts, ends, {2: SPAN}):
            at = zip(keys[column.rows], column.values, column.ends, strict=True)
            names |= {int(key): file.text(int(start), int(end)) for key, start, end in at}
    return names


def _kinds(
    file: ProfileBytes, spans: Spans, names: dict[int, str], texts: StatTexts
) -> pl.DataFrame:
    idents = np.zeros(len(spans), np.int64)
    stats = StatTable(file=file, names=names, n_rows=len(spans), texts=texts)
    labels = [""] * len(spans)
    wires = {1: VARINT, 2: SPAN, 3: SPAN, 4: SPAN, 5: SPAN}
    for first, keys, starts, ends in _entries(file, spans):
        idents[first : first + len(keys)] = keys
        for column in columns(file.view, starts, ends, wires):
            rows = column.rows + first
            if column.number == 5:
                stats.take(rows, column.values, column.ends)
            elif column.number == 2:
                at = (rows.tolist(), column.values.tolist(), column.ends.tolist())
                for row, start, end in zip(*at, strict=True):
                    labels[row] = file.text(start, end)
    table = {"id": idents, "name": labels}
    schema = {"id": pl.Int64, "name": pl.String}
    return pl.DataFrame(table, schema=schema).with_columns(stats.series())
