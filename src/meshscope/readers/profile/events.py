"""Decodes the events of one XPlane plane in chunks, into columns.

Times are integer picoseconds from the origin of the plane, as in the file: a Unix time in floating
point seconds would lose digits.
"""

import numpy as np
import polars as pl

from meshscope.readers.profile.source import ProfileBytes, check_limit
from meshscope.readers.profile.stats import StatColumn, StatTable, StatTexts, expect
from meshscope.readers.profile.wire import (
    SPAN,
    VARINT,
    Ints,
    Message,
    WireColumn,
    WireError,
    columns,
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
        self.name = file.last_text(message, 11) or file.last_text(message, 2)
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
    """Columns of events, filled chunk by chunk."""

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
