"""All that a profile recorded, as tracks of slices: what every writer of traces for others needs.

Texts are as recorded: writers pass them through `safe`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from meshscope.readers.profile.ops import zero_ns
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.session import Profile
from meshscope.readers.profile.stats import PREFIX

MAX_NAME = 2_000  # characters that are kept of a name or a text
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")
_HLO_NAME = re.compile(r"%?([^\s=%(]+) = ")
# Links between events of the profiler itself, breakdowns kept as bytes, and stacks of calls.
_INTERNAL = ("_", "memory_access_breakdown", "source_stack", "symbol_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The slices of one line: `slices` has kind, start_ps, dur_ps and the events' own arguments.

    `kinds` has kind, name and the arguments that all slices of a kind share. Processes are planes,
    numbered from 1 over all hosts; threads are lines, numbered from 1 in their process.
    Times count from the earliest event of all hosts.
    """

    pid: int
    process: str
    tid: int
    thread: str
    kinds: pl.DataFrame
    slices: pl.DataFrame


def tracks(profile: Profile) -> Iterator[Track]:
    """Every line that has events, of every plane of every host, on one clock."""
    pid, earliest_ps = 0, _earliest_ps(profile)
    for host, space in enumerate(profile.spaces):
        name = f"{profile.hosts['name'][host]} " if len(profile.spaces) > 1 else ""
        for plane in space.planes:
            if plane.events.is_empty():
                continue
            pid += 1
            shift_ps = _base_ps(profile, host, plane) - earliest_ps
            kinds = _kinds(plane)
            arguments = [c for c in plane.events.columns if _is_argument(c)]
            for tid, line in enumerate(plane.lines.iter_rows(named=True), start=1):
                chosen = plane.events.filter(pl.col("line") == line["line"])
                if chosen.is_empty():
                    continue
                slices = chosen.select(
                    "kind", pl.col("start_ps") + shift_ps, "dur_ps", *arguments
                ).rename({c: c.removeprefix(PREFIX) for c in arguments})
                yield Track(
                    pid=pid,
                    process=safe(name + plane.name),
                    tid=tid,
                    thread=safe(line["name"]),
                    kinds=kinds,
                    slices=slices,
                )


def safe(text: str) -> str:
    """The text without control characters; a long one is cut, with a mark of how long it was."""
    cut = text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}... [{len(text):,} characters]"
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", cut)


def _kinds(plane: Plane) -> pl.DataFrame:
    """Names as the TPU profiler shows them: the op alone, and its whole line as `long_name`."""
    arguments = [c for c in plane.kinds.columns if _is_argument(c)]
    names = list(plane.kinds.select("name", pl.col("display_name").fill_null("")).iter_rows())
    shown = [display or _short(name) for name, display in names]
    long = [None if name == label else name for (name, _), label in zip(names, shown, strict=True)]
    facts = plane.kinds.select("kind", *arguments).rename(
        {c: c.removeprefix(PREFIX) for c in arguments}
    )
    return facts.with_columns(
        pl.Series("name", shown, dtype=pl.String),
        pl.Series("long_name", long, dtype=pl.String),
    )


def _short(name: str) -> str:
    line = _HLO_NAME.match(name[:MAX_NAME])
    return line[1] if line else name


def _is_argument(column: str) -> bool:
    return column.startswith(PREFIX) and not column.removeprefix(PREFIX).startswith(_INTERNAL)


def _base_ps(profile: Profile, host: int, plane: Plane) -> int:
    zero = zero_ns(profile.spaces[host])
    offset_ps = round(float(profile.hosts["offset_s"][host]) * 1e12)
    return (plane.origin_ns - zero) * 1000 + offset_ps


def _earliest_ps(profile: Profile) -> int:
    starts = [
        _base_ps(profile, host, plane) + int(plane.events["start_ps"].min())  # type: ignore[arg-type]
        for host, space in enumerate(profile.spaces)
        for plane in space.planes
        if len(plane.events)
    ]
    return min(0, *starts) if starts else 0
