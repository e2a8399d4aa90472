"""Reads the Chrome trace that the TPU profiler exports: the planes of its XPlane, as far as they go.

The export has one process for each plane and one thread for each line. Arguments repeat the stats
that events have, all as text; `long_name` is the HLO line. The events become planes, so that what reads
XPlane reads them, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from meshscope.readers.profile.nesting import Ints
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.xplane import XSpace, host_of
from meshscope.readers.traces.json_stream import JsonTrace
from meshscope.readers.traces.trace import (
    ColumnParts,
    OpCodes,
    floats,
    nanoseconds,
    reading_findings,
    whole_numbers,
)

PS_PER_NS = 1000
MAX_HLO = 20_000  # characters of an HLO line

Scalar = int | str | float | None


class ChromeArgs(msgspec.Struct, gc=False):
    """The arguments that matter here; `name` of a metadata event is that of a process or thread."""

    name: Scalar = None
    long_name: str | None = None
    hlo_category: str | None = None
    hlo_op: str | None = None
    hlo_module: str | None = None
    program_id: Scalar = None
    run_id: Scalar = None
    tf_op: str | None = None
    source: str | None = None
    model_flops: Scalar = None
    bytes_accessed: Scalar = None
    device_offset_ps: Scalar = None
    device_duration_ps: Scalar = None
    step_num: Scalar = None


class ChromeEvent(msgspec.Struct, gc=False):
    """An event of any kind."""

    ph: str = ""
    name: str | None = None
    pid: Scalar = None
    tid: Scalar = None
    ts: float | None = None
    dur: float | None = None
    args: ChromeArgs | None = None


class _KindKey(NamedTuple):
    name: str
    category: str | None = None
    program_id: str | None = None
    tf_op: str | None = None
    source: str | None = None
    flops: str | None = None
    bytes_accessed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChromeTrace:
    """The planes of a Chrome trace, the events in the file, and what was left out."""

    space: XSpace
    n_events: int
    findings: tuple[str, ...] = field(default=())


def read_chrome(path: Path) -> ChromeTrace:
    """The planes of one host; TraceError if the file is no trace."""
    source = JsonTrace(path, ChromeEvent)
    reading = _Reading()
    for batch in source:
        reading.add(batch)
    planes, n_invalid, n_repeated = reading.planes()
    space = XSpace(
        path=path, host=host_of(path), planes=tuple(planes), errors=(), warnings=(), n_bytes=0
    )
    findings = reading_findings(source, n_invalid=n_invalid, n_repeated=n_repeated)
    return ChromeTrace(space=space, n_events=reading.n_events, findings=tuple(findings))


class _Reading:
    def __init__(self) -> None:
        self.n_events = 0
        self.processes: dict[int, str] = {}
        self.threads: dict[tuple[int, int], str] = {}
        self.kinds = OpCodes(_KindKey(name="(other ops)"))
        self.events = ColumnParts(
            ("kind", "pid", "tid", "start_ps", "dur_ps", "run_id", "step_num")
        )

    def add(self, batch: Sequence[ChromeEvent]) -> None:
        self.n_events += len(batch)
        for event in batch:
            if event.ph == "M":
                self._name(event)
        events = [event for event in batch if event.ph == "X"]
        if not events:
            return
        args = [event.args or _NO_ARGS for event in events]
        keys = [_kind_key(e, a) for e, a in zip(events, args, strict=True)]
        start, dur = (nanoseconds(floats([getattr(e, n) for e in events])) for n in ("ts", "dur"))
        self.events.add(
            kind=self.kinds.codes(keys),
            pid=whole_numbers([event.pid for event in events]),
            tid=whole_numbers([event.tid for event in events]),
            start_ps=_exact_ps(start, [a.device_offset_ps for a in args]),
            dur_ps=_exact_ps(dur, [a.device_duration_ps for a in args]),
            run_id=whole_numbers([a.run_id for a in args]),
            step_num=whole_numbers([a.step_num for a in args]),
        )

    def _name(self, event: ChromeEvent) -> None:
        pid, tid = whole_numbers([event.pid, event.tid]).tolist()
        name = None if event.args is None else event.args.name
        if event.name == "process_name" and isinstance(name, str):
            self.processes[pid] = name
        elif event.name == "thread_name" and isinstance(name, str):
            self.threads[pid, tid] = name

    def planes(self) -> tuple[list[Plane], int, int]:
        """A plane for each process, and the numbers of events left out as invalid and repeated."""
        frame = pl.DataFrame(self.events.taken())
        valid = frame.filter(pl.col("start_ps") >= 0, pl.col("dur_ps") >= 0)
        unique = valid.unique(maintain_order=True)
        kinds = _kind_table(self.kinds.keys)
        planes = [
            self._plane(events["pid"][0], events, kinds)
            for events in unique.partition_by("pid", maintain_order=True)
        ]
        return planes, len(frame) - len(valid), len(valid) - len(unique)

    def _plane(self, pid: int, events: pl.DataFrame, kinds: pl.DataFrame) -> Plane:
        tids = events["tid"].unique().sort().to_list()
        lines = pl.DataFrame(
            {
                "line": pl.Series(range(len(tids)), dtype=pl.UInt32),
                "id": pl.Series(tids, dtype=pl.Int64),
                "name": [self.threads.get((pid, tid), "") for tid in tids],
            }
        )
        placed = events.join(lines.select("line", tid="id"), on="tid", maintain_order="left")
        numbers = [
            pl.when(pl.col(name) >= 0).then(pl.col(name)).alias(f"stat.{name}")
            for name in ("run_id", "step_num")
        ]
        used = kinds.filter(pl.col("kind").is_in(events["kind"].unique().implode()))
        numbered = used.select("kind", new=pl.int_range(pl.len(), dtype=pl.UInt32))
        rows = placed.join(numbered, on="kind", maintain_order="left").select(
            "line", pl.col("new").alias("kind"), "start_ps", "dur_ps", *numbers
        )
        return Plane(
            name=self.processes.get(pid, ""),
            origin_ns=0,
            stats={},
            lines=lines,
            kinds=used.with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).alias("kind")),
            events=rows,
        )


def _kind_key(event: ChromeEvent, args: ChromeArgs) -> _KindKey:
    name = (args.long_name or event.name or "")[:MAX_HLO]
    if args.hlo_category is None and args.tf_op is None:
        return _KindKey(name)
    texts = (args.program_id, args.tf_op, args.source, args.model_flops, args.bytes_accessed)
    return _KindKey(name, args.hlo_category, *(None if t is None else str(t) for t in texts))


def _kind_table(keys: Sequence[_KindKey]) -> pl.DataFrame:
    """The kinds with the stats of XPlane's event metadata."""
    stats = {
        "hlo_category": "category",
        "program_id": "program_id",
        "tf_op": "tf_op",
        "source": "source",
        "flops": "flops",
        "bytes_accessed": "bytes_accessed",
    }
    columns: dict[str, Any] = {
        f"stat.{stat}": pl.Series([getattr(key, name) for key in keys], dtype=pl.String)
        for stat, name in stats.items()
    }
    names = pl.Series("name", [key.name for key in keys], dtype=pl.String)
    return pl.DataFrame({"name": names, "display_name": names, **columns}).with_row_index("kind")


def _exact_ps(ns: Ints, ps: Sequence[Scalar]) -> Ints:
    """The device's own picoseconds where the event has them, else the rounded times of the export."""
    exact = whole_numbers(ps)
    return np.where(exact >= 0, exact, np.where(ns >= 0, ns * PS_PER_NS, -1))


_NO_ARGS = ChromeArgs()
