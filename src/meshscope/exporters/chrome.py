"""A layout as Chrome's JSON trace, for chrome://tracing, Perfetto and whatever reads that form.

One process a device, one thread a lane; flows join the devices of a collective, counters show the load
of each link. Times are microseconds.
"""

import json
from collections.abc import Iterator
from io import BufferedIOBase
from typing import Any

from meshscope.exporters.layout import TimelineLayout, flows_of, link_counts

NS_PER_US = 1000


def write_chrome(layout: TimelineLayout, out: BufferedIOBase) -> None:
    """Writes the whole layout, an event a line."""
    meta = {"title": layout.title, "a length is": layout.unit_words}
    out.write(f'{{"displayTimeUnit":"ns","metadata":{_json(meta)},"traceEvents":[\n'.encode())
    separator = b""
    for event in _events(layout):
        out.write(separator + _json(event).encode())
        separator = b",\n"
    out.write(b"\n]}\n")


def _events(layout: TimelineLayout) -> Iterator[dict[str, Any]]:
    for device in layout.devices:
        yield from _device(layout, device)
    for count in link_counts(layout):
        yield {
            "ph": "C",
            "pid": 0,
            "name": count.link,
            "ts": count.at_ns / NS_PER_US,
            "args": {"bytes a second" if layout.is_time else "bytes": count.load},
        }


def _device(layout: TimelineLayout, device: int) -> Iterator[dict[str, Any]]:
    pid = device + 1
    words = f"device {device}: {layout.title} ({layout.unit_words})"
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": words}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    lanes = {"steps": 1}
    yield _thread(pid, 1, "steps")
    for step in layout.steps:
        yield _slice((pid, 1), step.name, step.start_ns, step.dur_ns, {})
    for execution in layout.of_device(device):
        if execution.lane not in lanes:
            lanes[execution.lane] = len(lanes) + 1
            yield _thread(pid, lanes[execution.lane], execution.lane)
        tid = lanes[execution.lane]
        start_ns = execution.start_ns
        yield _slice(
            (pid, tid), execution.name, start_ns, execution.dur_ns, dict(execution.arguments)
        )
        for flow in flows_of(execution, device):
            yield _flow(
                layout, execution.groups[(flow - 1) % 65_536], device, flow, (pid, tid, start_ns)
            )


def _flow(
    layout: TimelineLayout, group: tuple[int, ...], device: int, flow: int, at: tuple[int, int, int]
) -> dict[str, Any]:
    """A flow starts at the first shown device of its group and ends at the last."""
    shown = [member for member in group if member in layout.devices]
    place = "s" if device == shown[0] else ("f" if device == shown[-1] else "t")
    pid, tid, start_ns = at
    ends = {"bp": "e"} if place == "f" else {}
    return {
        "ph": place, "id": flow, "cat": "collective", "name": "group",
        "pid": pid, "tid": tid, "ts": start_ns / NS_PER_US, **ends,
    }  # fmt: skip


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _slice(
    at: tuple[int, int], name: str, start_ns: int, dur_ns: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": at[0], "tid": at[1], "name": name,
        "ts": start_ns / NS_PER_US, "dur": dur_ns / NS_PER_US, "args": arguments,
    }  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
