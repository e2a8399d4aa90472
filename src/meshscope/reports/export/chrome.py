"""Writes a timeline in Chrome's trace event format, for ui.perfetto.dev, chrome://tracing and similar tools.

One process per device or plane, one thread per lane; flow events join the devices of a collective, counters are loads.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

import polars as pl

from meshscope.events.timeline import ARGUMENT, Timeline, Track, printable

N_AT_ONCE = 50_000  # slices converted to text together
PS_PER_US, NS_PER_US = 1e6, 1000


def write_chrome(timeline: Timeline, path: Path, *, is_gzipped: bool) -> None:
    """Writes the timeline to `path`."""
    with path.open("wb") as raw:
        if not is_gzipped:
            _write(raw, timeline)
            return
        with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            _write(cast("BufferedIOBase", packed), timeline)


def _write(out: BufferedIOBase, timeline: Timeline) -> None:
    metadata = _json(timeline.metadata)
    out.write(f'{{"displayTimeUnit":"ns","metadata":{metadata},"traceEvents":['.encode())
    separator = b"\n"
    for block in _blocks(timeline):
        if block:
            out.write(separator + block.encode())
            separator = b",\n"
    out.write(b"\n]}\n")


def _blocks(timeline: Timeline) -> Iterator[str]:
    """Events as JSON objects joined by commas, many at a time."""
    seen, source, kinds = set[int](), None, pl.DataFrame()
    for track in timeline.tracks:
        yield _names(track, is_new_process=track.pid not in seen)
        seen.add(track.pid)
        if track.kinds is not source:
            source = track.kinds
            kinds = source.select(  # a text is escaped once, not once per slice
                "kind",
                _values(source["name"]).alias("name"),
                _arguments(source).alias("shared"),
            )
        for first in range(0, len(track.slices), N_AT_ONCE):
            block = track.slices.slice(first, N_AT_ONCE)
            yield _slices(track, block, kinds)
            if "flows" in block.columns:
                yield _flows(track, block)
    for counter in timeline.counters:
        head, unit = {"ph": "C", "pid": 0, "name": counter.name}, counter.unit
        samples = ({**head, "ts": at / NS_PER_US, "args": {unit: v}} for at, v in counter.samples)
        yield ",\n".join(map(_json, samples))


def _names(track: Track, *, is_new_process: bool) -> str:
    process: dict[str, Any] = {"ph": "M", "pid": track.pid}
    thread = {**process, "tid": track.tid}
    process_events = [
        process | {"name": "process_name", "args": {"name": track.process}},
        process | {"name": "process_sort_index", "args": {"sort_index": track.pid}},
    ]
    thread_events = [
        thread | {"name": "thread_name", "args": {"name": track.thread}},
        thread | {"name": "thread_sort_index", "args": {"sort_index": track.tid}},
    ]
    return ",\n".join(map(_json, [*(process_events if is_new_process else []), *thread_events]))


def _slices(track: Track, block: pl.DataFrame, kinds: pl.DataFrame) -> str:
    head = f'{{"ph":"X","pid":{track.pid},"tid":{track.tid},"ts":'
    rows = block.select(
        "kind",
        (pl.col("start_ps") / PS_PER_US).alias("ts"),
        (pl.col("dur_ps") / PS_PER_US).alias("dur"),
        _arguments(block).alias("single"),
    ).join(kinds, on="kind", how="left", maintain_order="left")
    text = pl.concat_str(
        pl.lit(head),
        pl.col("ts").cast(pl.String),
        pl.lit(',"dur":'),
        pl.col("dur").cast(pl.String),
        pl.lit(',"name":'),
        pl.col("name"),
        pl.lit(',"args":{'),
        pl.concat_str("shared", "single", separator=",", ignore_nulls=True),
        pl.lit("}}"),
    )
    return ",\n".join(rows.select(text).to_series())


def _flows(track: Track, block: pl.DataFrame) -> str:
    """Flow events at the starts of slices; a flow ends at the slice that encloses its last event."""
    head = f'{{"cat":"collective","name":"group","pid":{track.pid},"tid":{track.tid},"ph":"'
    flows = block.select("start_ps", "flows").explode("flows").drop_nulls().unnest("flows")
    text = pl.concat_str(
        pl.lit(head),
        "position",
        pl.lit('","id":'),
        pl.col("id").cast(pl.String),
        pl.lit(',"ts":'),
        (pl.col("start_ps") / PS_PER_US).cast(pl.String),
        pl.when(pl.col("position") == "f").then(pl.lit(',"bp":"e"}')).otherwise(pl.lit("}")),
    )
    return ",\n".join(flows.select(text).to_series())


def _arguments(frame: pl.DataFrame) -> pl.Series:
    """`"key":value` of the arguments of each row that are not null; null if all are."""
    pieces = [
        pl.concat_str(
            pl.lit(_json(name.removeprefix(ARGUMENT)) + ":"), pl.lit(_values(frame[name]))
        )
        for name in frame.columns
        if name.startswith(ARGUMENT)
    ]
    if not pieces:
        return pl.Series([None], dtype=pl.String).new_from_index(0, len(frame))
    joined = pl.concat_str(pieces, separator=",", ignore_nulls=True)
    return frame.select(pl.when(joined != "").then(joined)).to_series()


def _values(column: pl.Series) -> pl.Series:
    """Values as JSON; each different text or list is encoded once."""
    if column.dtype.is_numeric():
        return column.cast(pl.String)
    if isinstance(column.dtype, pl.List):
        lists = (None if values is None else _json(values) for values in column.to_list())
        return pl.Series(list(lists), dtype=pl.String)
    texts = column.cast(pl.String)
    unique = texts.unique().drop_nulls()
    escaped = [_json(printable(text)) for text in unique]
    return texts.replace_strict(unique, pl.Series(escaped, dtype=pl.String), default=None)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
