"""Writes a timeline as a Perfetto trace, for ui.perfetto.dev and the trace processor.

Fields follow protos/perfetto/trace (trace_packet, track_event, track_descriptor,
counter_descriptor, debug_annotation, interned_data). Times are nanoseconds; picoseconds are cut
off. Slices of a Perfetto track must nest, so slices that overlap otherwise go on further tracks of
the same name. The wire format (https://protobuf.dev/programming-guides/encoding) is what
`meshscope.readers.profile.wire` reads.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.events.timeline import ARGUMENT, Timeline, Track, printable
from meshscope.readers.profile.xplane import Profile, profile_timeline
from meshscope.reports.export.chrome import write_chrome

VARINT, FIXED64, SPAN = 0, 1, 2  # wire types


def varint(value: int) -> bytes:
    """A non-negative number, seven bits per byte."""
    if value < 0x80:
        return _ONE_BYTE[value]
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


_ONE_BYTE = [bytes([value]) for value in range(0x80)]


def number(field: int, value: int) -> bytes:
    """A varint field; a negative number is written as its 64-bit complement."""
    return varint(field << 3 | VARINT) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def span(field: int, content: bytes | str) -> bytes:
    """A length-delimited field: bytes, text or a message."""
    content = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | SPAN) + varint(len(content)) + content


def double(field: int, value: float) -> bytes:
    """A field of a double."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", value)


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
    """Numbers tracks, groups of tracks by their names, and interned names."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, ...], int] = {}
        self.names: dict[str, int] = {}
        self.n_tracks = 0

    def packets(self, timeline: Timeline) -> Iterator[bytes]:
        yield span(1, number(13, _CLEARED) + number(10, SEQUENCE))
        source, kinds = None, list[tuple[str, bytes]]()
        for track in timeline.tracks:
            if track.kinds is not source:
                source = track.kinds
                kinds = list(zip(map(printable, source["name"]), _annotations(source), strict=True))
            for depth in range(1, len(track.parents) + 1):
                if (path := track.parents[:depth]) not in self.groups:
                    yield self.group(path)
            yield from self.slices(track, kinds)
        for counter in timeline.counters:
            parent = number(5, next(iter(self.groups.values()), 0))
            unit = span(8, span(6, counter.unit))
            ident, described = self.track(span(2, counter.name) + parent + unit)
            yield described
            for at_ns, value in counter.samples:
                event = number(11, ident) + number(9, _COUNTER) + double(44, value)
                yield span(1, number(8, at_ns) + span(11, event) + _TAIL)

    def track(self, description: bytes) -> tuple[int, bytes]:
        """The id of a new track and the packet that describes it."""
        self.n_tracks += 1
        described = span(60, number(1, self.n_tracks) + description)
        return self.n_tracks, span(1, described + number(10, SEQUENCE))

    def group(self, path: tuple[str, ...]) -> bytes:
        """Describes a group of tracks; the outermost is a process."""
        *outer, name = path
        if outer:
            described = span(2, name) + number(5, self.groups[tuple(outer)])
        else:
            pid = 1 + sum(len(known) == 1 for known in self.groups)
            described = span(3, number(1, pid) + span(6, name))
        self.groups[path], packet = self.track(described)
        return packet

    def slices(self, track: Track, kinds: list[tuple[str, bytes]]) -> Iterator[bytes]:
        """The slices by start, on as many Perfetto tracks as their overlaps need."""
        heads: dict[int, bytes] = {}  # by kind: reference to its name, shared arguments
        idents: list[bytes] = []
        open_ends: list[list[int]] = []  # for each Perfetto track, the ends of its open slices, ns

        def closing(lane: int, until: int | None) -> Iterator[bytes]:
            ends = open_ends[lane]
            while ends and (until is None or ends[-1] <= until):
                event = span(11, idents[lane] + number(9, _END))
                yield span(1, b"\x40" + varint(ends.pop()) + event + _TAIL)

        for kind, start, end, arguments in _rows(track):
            lane = _nesting_lane(open_ends, start, end)
            if lane == len(open_ends):
                parent = number(5, self.groups[track.parents])
                ident, described = self.track(span(2, track.thread) + parent)
                yield described
                idents.append(number(11, ident))
                open_ends.append([])
            yield from closing(lane, start)
            open_ends[lane].append(end)
            introduced = b""
            if kind not in heads:
                name, shared = kinds[kind]
                if name not in self.names:
                    self.names[name] = len(self.names) + 1
                    introduced = span(12, span(2, number(1, self.names[name]) + span(2, name)))
                heads[kind] = number(10, self.names[name]) + shared
            event = span(11, idents[lane] + number(9, _BEGIN) + heads[kind] + arguments)
            yield span(1, b"\x40" + varint(start) + introduced + event + _TAIL)
        for lane in range(len(open_ends)):
            yield from closing(lane, None)


def _rows(track: Track) -> Iterator[tuple[int, int, int, bytes]]:
    end_ps = pl.col("start_ps") + pl.col("dur_ps")
    ordered = track.slices.with_columns(
        (pl.col("start_ps") // PS_PER_NS).alias("start_ns"), (end_ps // PS_PER_NS).alias("end_ns")
    ).sort("start_ns", "end_ns", descending=[False, True], maintain_order=True)
    for first in range(0, len(ordered), N_AT_ONCE):
        block = ordered.slice(first, N_AT_ONCE)
        times = block.select("kind", "start_ns", "end_ns").iter_rows()
        for (kind, start, end), arguments in zip(times, _annotations(block), strict=True):
            yield kind, start, max(start, end), arguments


def _nesting_lane(open_ends: list[list[int]], start: int, end: int) -> int:
    """The first lane in which the slice nests; a new one if it partly overlaps in all."""
    for lane, ends in enumerate(open_ends):
        still_open = next((e for e in reversed(ends) if e > start), None)
        if still_open is None or end <= still_open:
            return lane
    return len(open_ends)


def _annotations(frame: pl.DataFrame) -> list[bytes]:
    """The debug annotations and flows of each row; a value is encoded once."""
    columns: list[list[bytes]] = [[b""] * len(frame)]
    for name in frame.columns:
        values: list[Any] = frame[name].to_list() if name.startswith((ARGUMENT, "flows")) else []
        if name == "flows":
            head = varint(47 << 3 | FIXED64)
            flows = (
                [head + flow["id"].to_bytes(8, "little") for flow in row or ()] for row in values
            )
            columns.append(list(map(b"".join, flows)))
        elif name.startswith(ARGUMENT) and name not in _SAME_AS_SLICE:
            if isinstance(frame.schema[name], pl.List):
                values = [None if value is None else str(value) for value in values]
            head = span(10, name.removeprefix(ARGUMENT))
            encoded = {v: b"" if v is None else span(4, head + _value(v)) for v in set(values)}
            columns.append([encoded[value] for value in values])
    return list(map(b"".join, zip(*columns, strict=True)))


def _value(value: float | str) -> bytes:
    if isinstance(value, bool):
        return number(2, int(value))
    if isinstance(value, int):
        return number(4, value) if value < 2**63 else number(3, value)
    return double(5, value) if isinstance(value, float) else span(6, printable(value))


CHROME, PERFETTO = "chrome.trace.json.gz", "perfetto.pftrace"


def write_profile_traces(profile: Profile, folder: Path) -> None:
    """Writes the whole profile to `folder` as a Chrome and as a Perfetto trace."""
    chrome = profile_timeline(profile)
    write_chrome(chrome, folder / CHROME, is_gzipped=True, has_text_arguments=True)
    write_perfetto(profile_timeline(profile), folder / PERFETTO)
