"""Reads the Chrome trace that the TPU profiler exports: the planes of its XPlane, as far as they go.

The export has one process for each plane and one thread for each line. Arguments repeat the stats
that events have, all as text; `long_name` is the HLO line. The events become planes, so that what reads
XPlane reads them, too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from meshscope.events.intervals import Ints
from meshscope.readers.profile.plane import PREFIX, Plane, XSpace
from meshscope.readers.profile.xplane import host_of, profile_of
from meshscope.readers.traces.json_stream import JsonTrace, Scalar, TraceEvent
from meshscope.readers.traces.trace import (
    ColumnParts,
    OpCodes,
    Trace,
    TraceFormat,
    left_out,
    nanoseconds,
    whole_numbers,
)
from meshscope.readers.traces.xplane import trace_of_profile

PS_PER_NS = 1000
MAX_HLO = 20_000  # characters of an HLO line


class ChromeArgs(msgspec.Struct, gc=False):
    """The arguments that matter here; the `name` of a metadata event names a process or thread."""

    name: Scalar = None
    long_name: str | None = None
    hlo_category: str | None = None
    program_id: Scalar = None
    run_id: Scalar = None
    tf_op: str | None = None
    source: str | None = None
    device_offset_ps: Scalar = None
    device_duration_ps: Scalar = None
    step_num: Scalar = None


ChromeEvent = TraceEvent[ChromeArgs]


class _Kind(NamedTuple):
    """A kind of events, with the stats of XPlane's event metadata."""

    name: str
    hlo_category: str | None = None
    program_id: str | None = None
    source: str | None = None


def read_chrome(path: Path) -> Trace:
    """The trace of one host; TraceError if the file is no trace."""
    source = JsonTrace(path, ChromeEvent)
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    codes = OpCodes(_Kind(name="(other ops)"))
    columns = ColumnParts("kind", "pid", "tid", "start_ps", "dur_ps", "run_id", "step_num")
    n_events = 0
    for batch in source:
        n_events += len(batch)
        for event in batch:
            if event.ph == "M" and event.args is not None and isinstance(event.args.name, str):
                pid, tid = whole_numbers([event.pid, event.tid]).tolist()
                if event.name == "process_name":
                    processes[pid] = event.args.name
                elif event.name == "thread_name":
                    threads[pid, tid] = event.args.name
        _add([event for event in batch if event.ph == "X"], codes, columns)
    frame = pl.DataFrame(columns.taken())
    valid = frame.filter(pl.col("start_ps") >= 0, pl.col("dur_ps") >= 0)
    unique = valid.unique(maintain_order=True)
    schema = {n if n == "name" else PREFIX + n: pl.String for n in _Kind._fields}
    kinds = pl.DataFrame(list(codes.keys), schema=schema, orient="row").with_row_index("kind")
    planes = [
        _plane(processes.get(events["pid"][0], ""), events, kinds, threads)
        for events in unique.partition_by("pid", maintain_order=True)
    ]
    left = left_out(
        n_unreadable=source.n_unreadable,
        n_invalid=len(frame) - len(valid),
        n_repeated=len(valid) - len(unique),
    )
    profile = profile_of([XSpace(path=path, host=host_of(path), planes=tuple(planes))])
    findings = (*source.findings, *left)
    return trace_of_profile(profile, TraceFormat.CHROME_TPU, n_events=n_events, findings=findings)


def _add(events: Sequence[ChromeEvent], codes: OpCodes[_Kind], columns: ColumnParts) -> None:
    if not events:
        return
    args = [event.args or _NO_ARGS for event in events]
    start, dur = (nanoseconds([getattr(e, n) for e in events]) for n in ("ts", "dur"))
    columns.add(
        kind=codes.codes(map(_kind, events, args)),
        pid=whole_numbers([event.pid for event in events]),
        tid=whole_numbers([event.tid for event in events]),
        start_ps=_exact_ps(start, [a.device_offset_ps for a in args]),
        dur_ps=_exact_ps(dur, [a.device_duration_ps for a in args]),
        run_id=whole_numbers([a.run_id for a in args]),
        step_num=whole_numbers([a.step_num for a in args]),
    )


def _exact_ps(ns: Ints, ps: Sequence[Scalar]) -> Ints:
    """The device's own picoseconds where the event has them, else the rounded times of the export."""
    exact = whole_numbers(ps)
    return np.where(exact >= 0, exact, np.where(ns >= 0, ns * PS_PER_NS, -1))


def _kind(event: ChromeEvent, args: ChromeArgs) -> _Kind:
    name = (args.long_name or event.name or "")[:MAX_HLO]
    if args.hlo_category is None and args.tf_op is None:
        return _Kind(name)
    program = None if args.program_id is None else str(args.program_id)
    return _Kind(name, args.hlo_category, program, args.source)


def _plane(
    name: str, events: pl.DataFrame, kinds: pl.DataFrame, threads: dict[tuple[int, int], str]
) -> Plane:
    pid, tids = events["pid"][0], events["tid"].unique().sort()
    lines = pl.DataFrame({"tid": tids}).with_row_index("line")
    placed = events.join(lines, on="tid", maintain_order="left")
    stats = (pl.when(pl.col(s) >= 0).then(s).alias(PREFIX + s) for s in ("run_id", "step_num"))
    return Plane(
        name=name,
        origin_ns=0,
        stats={},
        lines=tuple(threads.get((pid, tid), "") for tid in tids),
        kinds=kinds,
        events=placed.select("line", "kind", "start_ps", "dur_ps", *stats),
    )


_NO_ARGS = ChromeArgs()
