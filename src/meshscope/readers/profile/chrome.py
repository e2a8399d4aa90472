"""A profile as a Chrome trace (`.trace.json.gz`), in the form of the TPU profiler's export.

Processes are planes, threads are lines; times are in microseconds; the arguments of an event are
texts: hlo_category, bytes_accessed, long_name, device_duration_ps, run_id, ...
"""

import gzip
import json
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

import polars as pl

from meshscope.readers.profile.session import Profile
from meshscope.readers.profile.timeline import Track, safe, tracks

N_AT_ONCE = 50_000  # events that are turned to text together
PS_PER_US = 1e6

_HEAD = '{"displayTimeUnit":"ns","metadata":{"highres-ticks":true},"traceEvents":['


def write_chrome_trace(profile: Profile, path: Path) -> None:
    """Writes the whole profile to `path`, gzipped; it appears when it is whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        _write(cast("BufferedIOBase", packed), tracks(profile))
    partial.replace(path)


def _write(out: BufferedIOBase, every: Iterator[Track]) -> None:
    out.write(_HEAD.encode())
    separator, seen = b"\n", set[int]()
    for track in every:
        for block in (_metadata(track, is_new=track.pid not in seen), *_events(track)):
            if block:
                out.write(separator + block.encode())
                separator = b",\n"
        seen.add(track.pid)
    out.write(b"\n]}\n")


def _metadata(track: Track, *, is_new: bool) -> str:
    """Names of the thread, and of the process before its first thread."""
    thread: dict[str, Any] = {"ph": "M", "pid": track.pid, "tid": track.tid}
    process: dict[str, Any] = {"ph": "M", "pid": track.pid}
    of_process = [
        process | {"name": "process_name", "args": {"name": track.process}},
        process | {"name": "process_sort_index", "args": {"sort_index": track.pid}},
    ]
    of_thread = [
        thread | {"name": "thread_name", "args": {"name": track.thread}},
        thread | {"name": "thread_sort_index", "args": {"sort_index": track.tid}},
    ]
    return ",\n".join(map(_json, [*(of_process if is_new else []), *of_thread]))


def _events(track: Track) -> Iterator[str]:
    """The slices as text, block by block; a text is escaped once for each kind or value."""
    kinds = track.kinds.select(
        "kind",
        _escaped(track.kinds["name"]).alias("name"),
        _arguments(track.kinds, ("kind", "name")),
    )
    head = f'{{"ph":"X","pid":{track.pid},"tid":{track.tid},"ts":'
    for first in range(0, len(track.slices), N_AT_ONCE):
        block = track.slices.slice(first, N_AT_ONCE)
        own = block.select(
            "kind",
            (pl.col("start_ps") / PS_PER_US).alias("ts"),
            (pl.col("dur_ps") / PS_PER_US).alias("dur"),
            _arguments(block, ("kind", "start_ps", "dur_ps")).alias("own"),
        ).join(kinds, on="kind", how="left", maintain_order="left")
        arguments = pl.concat_str("arguments", "own", separator=",", ignore_nulls=True)
        text = pl.concat_str(
            pl.lit(head),
            pl.col("ts").cast(pl.String),
            pl.lit(',"dur":'),
            pl.col("dur").cast(pl.String),
            pl.lit(',"name":'),
            pl.col("name"),
            pl.lit(',"args":{'),
            arguments,
            pl.lit("}}"),
        )
        yield ",\n".join(own.select(text).to_series())


def _arguments(frame: pl.DataFrame, besides: tuple[str, ...]) -> pl.Series:
    """`"key":"value"` of all columns that are not null, joined; null where all are."""
    pieces = [
        pl.concat_str(pl.lit(_json(column) + ":"), pl.lit(_escaped(frame[column])))
        for column in frame.columns
        if column not in besides
    ]
    if not pieces:
        return pl.Series("arguments", [None], dtype=pl.String).new_from_index(0, len(frame))
    joined = pl.concat_str(pieces, separator=",", ignore_nulls=True)
    kept = pl.when(joined != "").then(joined)
    return frame.select(kept.alias("arguments")).to_series()


def _escaped(column: pl.Series) -> pl.Series:
    """Values as JSON texts; a text is escaped once, however many rows have it."""
    if column.dtype.is_numeric():
        return column.to_frame("v").select('"' + pl.col("v").cast(pl.String) + '"').to_series()
    texts = column.cast(pl.String)
    unique = texts.unique().drop_nulls()
    escaped = [_json(safe(text)) for text in unique]
    return texts.replace_strict(unique, pl.Series(escaped, dtype=pl.String), default=None)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
