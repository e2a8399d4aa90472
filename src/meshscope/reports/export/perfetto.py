"""Writes a timeline as a Perfetto trace, for ui.perfetto.dev and the trace processor.

Fields are those of protos/perfetto/trace (trace_packet, track_event, track_descriptor,
counter_descriptor, debug_annotation, interned_data). Times are nanoseconds; picoseconds are cut
off. Slices of a Perfetto track must nest, so slices that overlap otherwise go on further tracks of
the same name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.events.timeline import ARGUMENT, Counter, Timeline, Track, printable
from meshscope.readers.profile.xplane import Profile, profile_timeline
from meshscope.reports.export.chrome import write_chrome
from meshscope.reports.export.protobuf import double, fixed64, number, span, varint

N_AT_ONCE = 20_000  # slices whose arguments are encoded together
PS_PER_NS = 1000
SEQUENCE = 1  # id of the packet sequence
_CLEARED, _NEEDED = 1, 2  # sequence flags: interned names start here; interned names are used
_BEGIN, _END, _COUNTER = 1, 2, 4  # types of a track event
_TAIL = number(13, _NEEDED) + number(10, SEQUENCE)  # ends every packet that has a time
_SAME_AS_SLICE = (ARGUMENT + "device_offset_ps", ARGUMENT + "device_duration_ps")


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """Writes the timeline to `path`."""
    with path.open("wb") as out:
        out.writelines(_Writer().packets(timeline))


class _Writer:
    """Assigns ids to tracks and interned names."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], int] = {}
        self._names: dict[str, int] = {}
        self._last_track = 0

    def packets(self, timeline: Timeline) -> Iterator[bytes]:
        """Every packet of the trace."""
        yield _packet(number(13, _CLEARED))
        kinds = _Kinds(pl.DataFrame(schema={"kind": pl.UInt32, "name": pl.String}))
        for track in timeline.tracks:
            if track.kinds is not kinds.source:
                kinds = _Kinds(track.kinds)
            for depth in range(1, len(track.parents) + 1):
                yield self._group(track.parents[:depth])
            yield from _Lanes(self, track, kinds).packets()
        for counter in timeline.counters:
            yield from self._counter(counter)

    def parent(self, path: tuple[str, ...]) -> int:
        """Id of the group with these names."""
        return self._groups[path]

    def new_track(self) -> int:
        """An unused track id."""
        self._last_track += 1
        return self._last_track

    def interned(self, name: str) -> tuple[bytes, bytes]:
        """The field that refers to a name, and the one that introduces it on its first use."""
        if name in self._names:
            return number(10, self._names[name]), b""
        ident = self._names[name] = len(self._names) + 1
        return number(10, ident), span(12, span(2, number(1, ident) + span(2, name)))

    def _group(self, path: tuple[str, ...]) -> bytes:
        """Describes a group of tracks once: the outermost is a process."""
        if path in self._groups:
            return b""
        *outer, name = path
        ident = self._groups[path] = self.new_track()
        if outer:
            parent = number(5, self._groups[tuple(outer)])
            return _packet(span(60, number(1, ident) + span(2, name) + parent))
        pid = sum(len(known) == 1 for known in self._groups)
        return _packet(span(60, number(1, ident) + span(3, number(1, pid) + span(6, name))))

    def _counter(self, counter: Counter) -> Iterator[bytes]:
        track = number(11, self.new_track())
        parent = number(5, next(iter(self._groups.values()), 0))
        described = number(1, self._last_track) + span(2, counter.name) + parent
        yield _packet(span(60, described + span(8, span(6, counter.unit))))
        for at_ns, value in counter.samples:
            event = track + number(9, _COUNTER) + double(44, value)
            yield span(1, number(8, at_ns) + span(11, event) + _TAIL)


class _Kinds:
    """Names and encoded shared arguments of the kinds of slices."""

    def __init__(self, source: pl.DataFrame) -> None:
        self.source = source
        self.names = [printable(name) for name in source["name"]]
        shared = zip(*_annotations(source), strict=True)
        self.shared = [b"".join(row) for row in shared] or [b""] * len(source)


class _Lanes:
    """One track of a timeline as as many Perfetto tracks as its overlaps need."""

    def __init__(self, writer: _Writer, track: Track, kinds: _Kinds) -> None:
        self._writer = writer
        self._track = track
        self._kinds = kinds
        self._heads: dict[int, bytes] = {}  # by kind: reference to its name, shared arguments
        self._ends: list[list[int]] = []  # for each lane, the ends of its open slices, ns
        self._begins: list[bytes] = []  # for each lane, the fields of a begin event
        self._closes: list[bytes] = []  # for each lane, an end packet without its time

    def packets(self) -> Iterator[bytes]:
        """The slices by start; begins and ends of each Perfetto track are in order."""
        end_ps = pl.col("start_ps") + pl.col("dur_ps")
        ordered = self._track.slices.with_columns(
            (pl.col("start_ps") // PS_PER_NS).alias("start_ns"),
            (end_ps // PS_PER_NS).alias("end_ns"),
        ).sort("start_ns", "end_ns", descending=[False, True], maintain_order=True)
        for first in range(0, len(ordered), N_AT_ONCE):
            block = ordered.slice(first, N_AT_ONCE)
            columns = [*_annotations(block), *_flows(block)]
            times = block.select("kind", "start_ns", "end_ns").iter_rows()
            single = zip(*columns, strict=True) if columns else iter([()] * len(block))
            for (kind, start, end), row in zip(times, single, strict=True):
                yield from self._slice(kind, start, max(start, end), b"".join(row))
        for lane in range(len(self._ends)):
            yield from self._closing(lane, None)

    def _slice(self, kind: int, start: int, end: int, single: bytes) -> Iterator[bytes]:
        lane = self._lane(start, end)
        if lane == len(self._ends):
            yield self._open()
        yield from self._closing(lane, start)
        self._ends[lane].append(end)
        introduced = b""
        if kind not in self._heads:
            name, introduced = self._writer.interned(self._kinds.names[kind])
            self._heads[kind] = name + self._kinds.shared[kind]
        event = span(11, self._begins[lane] + self._heads[kind] + single)
        yield span(1, b"\x40" + varint(start) + introduced + event + _TAIL)

    def _lane(self, start: int, end: int) -> int:
        """The first lane in which the slice nests; a new one if it partly overlaps in all."""
        for lane, ends in enumerate(self._ends):
            still_open = next((e for e in reversed(ends) if e > start), None)
            if still_open is None or end <= still_open:
                return lane
        return len(self._ends)

    def _open(self) -> bytes:
        ident = self._writer.new_track()
        self._ends.append([])
        self._begins.append(number(11, ident) + number(9, _BEGIN))
        self._closes.append(span(11, number(11, ident) + number(9, _END)) + _TAIL)
        parent = number(5, self._writer.parent(self._track.parents))
        return _packet(span(60, number(1, ident) + span(2, self._track.thread) + parent))

    def _closing(self, lane: int, until: int | None) -> Iterator[bytes]:
        """Ends open slices that end by `until`, the innermost first; all of them if it is None."""
        ends = self._ends[lane]
        while ends and (until is None or ends[-1] <= until):
            yield span(1, b"\x40" + varint(ends.pop()) + self._closes[lane])


def _annotations(frame: pl.DataFrame) -> list[list[bytes]]:
    """For each argument column, the debug annotation of each row; a value is encoded once."""
    encoded_columns: list[list[bytes]] = []
    for name in frame.columns:
        if not name.startswith(ARGUMENT) or name in _SAME_AS_SLICE:
            continue
        is_list = isinstance(frame.schema[name], pl.List)
        values = list(map(_text_of, frame[name].to_list())) if is_list else frame[name].to_list()
        head = span(10, name.removeprefix(ARGUMENT))
        encoded = {v: b"" if v is None else span(4, head + _value(v)) for v in set(values)}
        encoded_columns.append([encoded[value] for value in values])
    return encoded_columns


def _text_of(values: list[Any] | None) -> str | None:
    return None if values is None else str(values)


def _flows(block: pl.DataFrame) -> list[list[bytes]]:
    if "flows" not in block.columns:
        return []
    flows = block["flows"].to_list()
    return [[b"".join(fixed64(47, flow["id"]) for flow in row or ()) for row in flows]]


def _value(value: float | str) -> bytes:
    if isinstance(value, bool):
        return number(2, int(value))
    if isinstance(value, int):
        return number(4, value) if value < 2**63 else number(3, value)
    return double(5, value) if isinstance(value, float) else span(6, printable(value))


def _packet(content: bytes) -> bytes:
    return span(1, content + number(10, SEQUENCE))


CHROME, PERFETTO = "chrome.trace.json.gz", "perfetto.pftrace"


def write_profile_traces(profile: Profile, folder: Path) -> None:
    """Writes the whole profile to `folder` as a Chrome and as a Perfetto trace."""
    chrome = profile_timeline(profile)
    write_chrome(chrome, folder / CHROME, is_gzipped=True, has_text_arguments=True)
    write_perfetto(profile_timeline(profile), folder / PERFETTO)
