"""A profile as a Perfetto trace (`.perfetto-trace`), for ui.perfetto.dev and the trace processor.

Fields are those of protos/perfetto/trace (trace_packet, track_event, track_descriptor,
debug_annotation, interned_data). Times are nanoseconds; a profile's picoseconds are cut off.
A track shows slices that nest; those that overlap otherwise go on further tracks of the line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.readers.profile.encode import number, span, varint
from meshscope.readers.profile.session import Profile
from meshscope.readers.profile.timeline import Track, safe, tracks

N_AT_ONCE = 20_000  # slices whose arguments are prepared together
PS_PER_NS = 1000
SEQUENCE = 1  # of packets; one writer made them all
_CLEARED, _NEEDED = 1, 2  # sequence flags: interned names begin here, interned names are used
_BEGIN, _END = 1, 2  # types of a track event
_REPEATED = ("device_offset_ps", "device_duration_ps")  # the slice itself shows them


def write_perfetto_trace(profile: Profile, path: Path) -> None:
    """Writes the whole profile to `path`; it appears when it is whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as out:
        for packet in _packets(profile):
            out.write(packet)
    partial.replace(path)


def _packets(profile: Profile) -> Iterator[bytes]:
    yield _packet(number(13, _CLEARED))
    uuids, pid = _Counter(), 0
    process_uuid = 0
    names = _Names()
    for track in tracks(profile):
        if track.pid != pid:
            pid, process_uuid = track.pid, uuids.next()
            process = number(1, pid) + span(6, track.process)
            yield _packet(span(60, number(1, process_uuid) + span(3, process)))
        yield from _Lanes(track, process_uuid, uuids, names).packets()


class _Counter:
    """Ids of tracks, from 1 on."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """An id that was not given before."""
        self._last += 1
        return self._last


class _Names:
    """Interned names of kinds; a name is written once, before its first slice."""

    def __init__(self) -> None:
        self._last = 0

    def introduce(self, name: str) -> tuple[bytes, bytes]:
        """The field that names a slice by a new id, and the one that introduces the id."""
        self._last += 1
        interned = number(1, self._last) + span(2, safe(name))
        return number(10, self._last), span(12, span(2, interned))


class _Lanes:
    """One line of a profile as as many tracks as its overlaps need."""

    def __init__(self, track: Track, parent: int, uuids: _Counter, names: _Names) -> None:
        self._track = track
        self._parent = parent
        self._uuids = uuids
        self._names = names
        self._labels: list[str] = track.kinds["name"].to_list()
        shared = zip(*_annotations(track.kinds, ("kind", "name")), strict=True)
        self._shared = [b"".join(row) for row in shared] or [b""] * len(track.kinds)
        self._named: dict[int, bytes] = {}  # by kind: its name's id, and what its slices share
        self._ends: list[list[int]] = []  # for each lane, the ends of its open slices, ns
        self._begins: list[bytes] = []  # for each lane, how an event that begins a slice begins
        self._closes: list[bytes] = []  # for each lane, a packet that ends a slice, but its time

    def packets(self) -> Iterator[bytes]:
        """The slices in the order of their starts, each track's begins and ends in order."""
        end = pl.col("start_ps") + pl.col("dur_ps")
        ordered = self._track.slices.with_columns(
            (pl.col("start_ps") // PS_PER_NS).alias("start_ns"), (end // PS_PER_NS).alias("end_ns")
        ).sort("start_ns", "end_ns", descending=[False, True], maintain_order=True)
        besides = ("kind", "start_ps", "dur_ps", "start_ns", "end_ns")
        for first in range(0, len(ordered), N_AT_ONCE):
            block = ordered.slice(first, N_AT_ONCE)
            own = _annotations(block, (*besides, *_REPEATED))
            times = block.select("kind", "start_ns", "end_ns").iter_rows()
            arguments = zip(*own, strict=True) if own else iter([()] * len(block))
            for (kind, start, end_ns), row in zip(times, arguments, strict=True):
                yield from self._slice(kind, start, max(start, end_ns), b"".join(row))
        for lane in range(len(self._ends)):
            yield from self._closing(lane, None)

    def _slice(self, kind: int, start: int, end: int, own: bytes) -> Iterator[bytes]:
        lane = self._lane(start, end)
        if lane == len(self._ends):
            yield self._open()
        yield from self._closing(lane, start)
        self._ends[lane].append(end)
        introduced = b""
        if kind not in self._named:
            named, introduced = self._names.introduce(self._labels[kind])
            self._named[kind] = named + self._shared[kind]
        event = span(11, self._begins[lane] + self._named[kind] + own)
        yield span(1, b"\x40" + varint(start) + introduced + event + _TAIL)

    def _lane(self, start: int, end: int) -> int:
        """The first lane in which the slice nests; a new one where it overlaps in all."""
        for lane, ends in enumerate(self._ends):
            still_open = next((e for e in reversed(ends) if e > start), None)
            if still_open is None or end <= still_open:
                return lane
        return len(self._ends)

    def _open(self) -> bytes:
        uuid = self._uuids.next()
        self._ends.append([])
        self._begins.append(number(11, uuid) + number(9, _BEGIN))
        self._closes.append(span(11, number(11, uuid) + number(9, _END)) + _TAIL)
        name = span(2, self._track.thread)
        return _packet(span(60, number(1, uuid) + name + number(5, self._parent)))

    def _closing(self, lane: int, until: int | None) -> Iterator[bytes]:
        """Ends the open slices that end until then, the innermost first; all of them without."""
        ends = self._ends[lane]
        while ends and (until is None or ends[-1] <= until):
            yield span(1, b"\x40" + varint(ends.pop()) + self._closes[lane])


def _annotations(frame: pl.DataFrame, besides: tuple[str, ...]) -> list[list[bytes]]:
    """For each column, the debug annotation of each row; a value is encoded once."""
    found: list[list[bytes]] = []
    for column in frame.columns:
        if column in besides:
            continue
        name, encoded = span(10, column), dict[Any, bytes]()
        values = frame[column].to_list()
        for value in set(values):
            encoded[value] = b"" if value is None else span(4, name + _value(value))
        found.append([encoded[value] for value in values])
    return found


def _value(value: float | str) -> bytes:
    if isinstance(value, int):
        return number(4, value) if value < 2**63 else number(3, value)
    return span(6, safe(str(value)))


def _packet(content: bytes) -> bytes:
    return span(1, content + number(10, SEQUENCE))


# What every packet with a time (field 8, tag 0x40) ends with: uses interned names, is of the sequence.
_TAIL = number(13, _NEEDED) + number(10, SEQUENCE)
