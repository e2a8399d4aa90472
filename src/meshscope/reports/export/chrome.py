"""Writes a timeline in Chrome's trace event format, for ui.perfetto.dev, chrome://tracing and similar tools.

One process per device, one thread per lane; flow events join the devices of a collective.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl

N_AT_ONCE = 50_000  # slices converted to text together
NS_PER_US = 1000
FLOWS_OF_A_TIMELINE = 2**44
# An id, and the position of the device among those shown: s (first), t or f (last).
FLOWS = pl.List(pl.Struct({"id": pl.UInt64, "position": pl.String}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a trace file shows: `rows` are slices with device, lane, kind, start_ns, dur_ns and `flows` (FLOWS).

    `kinds` has the name and the arguments of each kind, by its number.
    """

    title: str
    length: str  # what a length is
    process: str  # a device's name goes on with it
    kinds: Sequence[tuple[str, Mapping[str, Any]]]
    rows: pl.DataFrame


def write_chrome(timelines: Sequence[Timeline], path: Path, *, is_gzipped: bool) -> None:
    """Writes the timelines to `path`, one below the other."""
    with path.open("wb") as raw:
        packed = gzip.GzipFile("", "wb", 6, raw, mtime=0) if is_gzipped else nullcontext(raw)
        with packed as out:
            title = "; ".join(timeline.title for timeline in timelines)
            lengths = "; ".join(dict.fromkeys(timeline.length for timeline in timelines))
            metadata = _json({"title": title, "a length is": lengths})
            head = f'{{"displayTimeUnit":"ns","metadata":{metadata},"traceEvents":[\n'
            out.write(head.encode())
            for number, block in enumerate(filter(None, _blocks(timelines))):
                out.write(((",\n" if number else "") + block).encode())
            out.write(b"\n]}\n")


def _blocks(timelines: Sequence[Timeline]) -> Iterator[str]:
    """The events of each timeline, whose processes and flows have numbers of their own."""
    first_pid = 0
    for number, timeline in enumerate(timelines):
        yield from _events_of(timeline, first_pid, number * FLOWS_OF_A_TIMELINE)
        first_pid += 2 + int(timeline.rows["device"].cast(pl.Int64).max() or 0)  # type: ignore[arg-type]


def _events_of(timeline: Timeline, first_pid: int, first_flow: int) -> Iterator[str]:
    """Events as JSON objects joined by commas, many at a time; slices that overlap in a lane are on further threads."""
    kinds = (f'"name":{_json(name)},"args":{_json(facts)}}}' for name, facts in timeline.kinds)
    texts = pl.Series("text", list(kinds), dtype=pl.String)
    devices = timeline.rows.partition_by("device", as_dict=True)
    for (device,), of_device in sorted(devices.items()):
        pid, tids = first_pid + int(device) + 1, count(1)
        yield _named("process", f"device {device}: {timeline.process}", pid=pid)
        for (lane,), of_lane in of_device.partition_by("lane", as_dict=True).items():
            threads = lanes_of(of_lane.sort("start_ns", maintain_order=True))
            for number, (part, tid) in enumerate(zip(threads, tids, strict=False), start=1):
                name = lane if number == 1 else f"{lane} ({number})"
                yield _named("thread", name, pid=pid, tid=tid)
                for block in part.iter_slices(N_AT_ONCE):
                    drawn = block.with_columns(texts.gather(block["kind"]))
                    yield from _events(drawn, f'"pid":{pid},"tid":{tid},"ts":', first_flow)


def lanes_of(slices: pl.DataFrame) -> list[pl.DataFrame]:
    """The slices on as few lanes as they need, none of which overlaps another one of its lane."""
    bounds = slices.select("start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    ordered = bounds.with_row_index("row").sort("start_ns", "end_ns", maintain_order=True)
    reached = pl.col("end_ns").cum_max().shift(1).fill_null(0)
    if not ordered.select((pl.col("start_ns") < reached).any()).item():
        return [slices]
    ends: list[int] = []  # of the last slice of each lane
    rows: list[list[int]] = []
    for row, start, end in ordered.iter_rows():
        lane = next((i for i, last in enumerate(ends) if last <= start), len(rows))
        if lane == len(rows):
            ends.append(end)
            rows.append([])
        ends[lane] = end
        rows[lane].append(row)
    return [slices[sorted(of_lane)] for of_lane in rows]


def _named(what: str, name: str, **place: int) -> str:
    facts = {"name": {"name": name}, "sort_index": {"sort_index": [*place.values()][-1]}}
    events = ({"ph": "M", **place, "name": f"{what}_{n}", "args": of} for n, of in facts.items())
    return ",\n".join(map(_json, events))


def _events(slices: pl.DataFrame, place: str, first_flow: int) -> Iterator[str]:
    """The slices, and flow events at their starts; a flow ends at the slice that encloses its last event."""
    start, dur = ((pl.col(n) / NS_PER_US).cast(pl.String) for n in ("start_ns", "dur_ns"))
    head = pl.lit(f'{{"ph":"X",{place}')
    text = pl.concat_str(head, start, pl.lit(',"dur":'), dur, pl.lit(","), "text")
    yield ",\n".join(slices.select(text).to_series())
    flows = slices.select("start_ns", "flows").explode("flows").drop_nulls().unnest("flows")
    is_last = pl.col("position") == "f"
    text = pl.concat_str(
        pl.lit('{"cat":"collective","name":"group","ph":"'),
        "position",
        pl.lit('","id":'),
        (pl.col("id") + first_flow).cast(pl.String),
        pl.lit(f",{place}"),
        start,
        pl.when(is_last).then(pl.lit(',"bp":"e"}')).otherwise(pl.lit("}")),
    )
    yield ",\n".join(flows.select(text).to_series())


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
