"""A layout as a Perfetto trace (`.perfetto-trace`), for ui.perfetto.dev and the trace processor.

Tracks: the plan, its chips, and on each device its steps, compute, copies, and communication by axis;
flows join the devices of a collective; counters show the load of each link. Fields are those of
protos/perfetto/trace (trace_packet, track_event, track_descriptor, counter_descriptor).
"""

from collections.abc import Iterator
from io import BufferedIOBase
from typing import Any

from meshscope.exporters.layout import TimelineLayout, flows_of, link_counts
from meshscope.readers.profile.encode import double, fixed64, number, span

SEQUENCE = 1  # of packets; one writer made them all
_CLEARED, _NEEDED = 1, 2  # sequence flags: interned names begin here, interned names are used
_BEGIN, _END, _COUNTER = 1, 2, 4  # types of a track event
_TAIL = number(13, _NEEDED) + number(10, SEQUENCE)


def write_perfetto(layout: TimelineLayout, out: BufferedIOBase) -> None:
    """Writes the whole layout."""
    writer = _Writer()
    out.writelines(writer.packets(layout))


class _Writer:
    """Ids of tracks and of names that were introduced."""

    def __init__(self) -> None:
        self._last_track = 0
        self._names: dict[str, int] = {}

    def packets(self, layout: TimelineLayout) -> Iterator[bytes]:
        yield span(1, number(13, _CLEARED) + number(10, SEQUENCE))
        plan = self._next()
        process = number(1, 1) + span(6, f"{layout.title} ({layout.unit_words})")
        yield _packet(span(60, number(1, plan) + span(3, process)))
        per_chip = 1 if layout.topology is None else layout.topology.chip.devices_per_chip
        chips: dict[int, int] = {}
        for device in layout.devices:
            chip = device // per_chip
            if chip not in chips:
                chips[chip], descriptor = self._track(f"chip {chip}", plan)
                yield descriptor
            yield from self._device(layout, device, chips[chip], is_alone=per_chip == 1)
        yield from self._counters(layout, plan)

    def _device(
        self, layout: TimelineLayout, device: int, chip: int, *, is_alone: bool
    ) -> Iterator[bytes]:
        parent = chip
        if not is_alone:
            parent, descriptor = self._track(f"device {device}", chip)
            yield descriptor
        steps, descriptor = self._track("steps", parent)
        yield descriptor
        for step in layout.steps:
            yield from self._slice(steps, step.name, step.start_ns, step.dur_ns, b"")
        lanes: dict[str, int] = {}
        for execution in layout.of_device(device):
            if execution.lane not in lanes:
                lanes[execution.lane], descriptor = self._track(execution.lane, parent)
                yield descriptor
            extra = b"".join(fixed64(47, flow) for flow in flows_of(execution, device))
            extra += b"".join(_annotation(*pair) for pair in execution.arguments.items())
            yield from self._slice(
                lanes[execution.lane], execution.name, execution.start_ns, execution.dur_ns, extra
            )

    def _slice(
        self, track: int, name: str, start_ns: int, dur_ns: int, extra: bytes
    ) -> Iterator[bytes]:
        named, introduced = self._name(name)
        event = number(11, track) + number(9, _BEGIN) + named + extra
        yield span(1, number(8, start_ns) + introduced + span(11, event) + _TAIL)
        end = number(11, track) + number(9, _END)
        yield span(1, number(8, start_ns + dur_ns) + span(11, end) + _TAIL)

    def _counters(self, layout: TimelineLayout, plan: int) -> Iterator[bytes]:
        unit = "bytes/s" if layout.is_time else "bytes of an operation"
        tracks: dict[str, int] = {}
        for count in link_counts(layout):
            if count.link not in tracks:
                tracks[count.link] = self._next()
                counter = span(8, span(6, unit))
                named = number(1, tracks[count.link]) + span(2, count.link) + number(5, plan)
                yield _packet(span(60, named + counter))
            event = number(11, tracks[count.link]) + number(9, _COUNTER) + double(44, count.load)
            yield span(1, number(8, count.at_ns) + span(11, event) + _TAIL)

    def _track(self, name: str, parent: int) -> tuple[int, bytes]:
        uuid = self._next()
        return uuid, _packet(span(60, number(1, uuid) + span(2, name) + number(5, parent)))

    def _next(self) -> int:
        self._last_track += 1
        return self._last_track

    def _name(self, name: str) -> tuple[bytes, bytes]:
        """The field that names a slice, and what introduces its id when it is new."""
        if name in self._names:
            return number(10, self._names[name]), b""
        ident = self._names[name] = len(self._names) + 1
        return number(10, ident), span(12, span(2, number(1, ident) + span(2, name)))


def _annotation(name: str, value: Any) -> bytes:
    if isinstance(value, bool):
        told = number(2, int(value))
    elif isinstance(value, int):
        told = number(4, value)
    elif isinstance(value, float):
        told = double(5, value)
    else:
        told = span(6, str(value))
    return span(4, span(10, name) + told)


def _packet(content: bytes) -> bytes:
    return span(1, content + number(10, SEQUENCE))
