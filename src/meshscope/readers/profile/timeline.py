"""A profile as a timeline: one track per line of each plane, all hosts on one clock."""

import re
from collections.abc import Iterator

import polars as pl

from meshscope.events.timeline import ARGUMENT, MAX_CHARACTERS, Timeline, Track, printable
from meshscope.readers.profile.ops import zero_ns
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.session import Profile
from meshscope.readers.profile.stats import PREFIX

_HLO_NAME = re.compile(r"%?([^\s=%(]+) = ")
# Links between events of the profiler itself, breakdowns stored as bytes, and call stacks.
_INTERNAL = ("_", "memory_access_breakdown", "source_stack", "symbol_id")
_METADATA = {"highres-ticks": True}  # as the TPU profiler writes it


def profile_timeline(profile: Profile) -> Timeline:
    """Every event of the profile; times count from the earliest event of all hosts.

    Processes are planes, numbered from 1 over all hosts; threads are lines, numbered from 1.
    """
    return Timeline(tracks=_tracks(profile), metadata=_METADATA)


def _tracks(profile: Profile) -> Iterator[Track]:
    pid, earliest_ps = 0, _earliest_ps(profile)
    for host, space in enumerate(profile.spaces):
        prefix = f"{profile.hosts['name'][host]} " if len(profile.spaces) > 1 else ""
        for plane in space.planes:
            if plane.events.is_empty():
                continue
            pid += 1
            shift_ps = _base_ps(profile, host, plane) - earliest_ps
            yield from _tracks_of_plane(plane, pid, printable(prefix + plane.name), shift_ps)


def _tracks_of_plane(plane: Plane, pid: int, process: str, shift_ps: int) -> Iterator[Track]:
    kinds = _kinds(plane)
    arguments = _arguments(plane.events)
    start_ps = pl.col("start_ps") + shift_ps
    for tid, line in enumerate(plane.lines.iter_rows(named=True), start=1):
        events = plane.events.filter(pl.col("line") == line["line"])
        if events.is_empty():
            continue
        slices = events.select("kind", start_ps, "dur_ps", *arguments).rename(arguments)
        yield Track(
            pid=pid,
            process=process,
            tid=tid,
            thread=printable(line["name"]),
            parents=(process,),
            kinds=kinds,
            slices=slices,
        )


def _kinds(plane: Plane) -> pl.DataFrame:
    """Kinds named as the TPU profiler shows them: the op, with its HLO line as `long_name`."""
    arguments = _arguments(plane.kinds)
    rows = plane.kinds.select("name", pl.col("display_name").fill_null("")).rows()
    shown = [display_name or _short(name) for name, display_name in rows]
    full = [None if name == label else name for (name, _), label in zip(rows, shown, strict=True)]
    return (
        plane.kinds.select("kind", *arguments)
        .rename(arguments)
        .with_columns(
            pl.Series("name", shown, dtype=pl.String),
            pl.Series(ARGUMENT + "long_name", full, dtype=pl.String),
        )
    )


def _short(name: str) -> str:
    line = _HLO_NAME.match(name[:MAX_CHARACTERS])
    return line[1] if line else name


def _arguments(frame: pl.DataFrame) -> dict[str, str]:
    """The columns of stats worth showing, with their names as arguments."""
    stats = [c.removeprefix(PREFIX) for c in frame.columns if c.startswith(PREFIX)]
    return {PREFIX + s: ARGUMENT + s for s in stats if not s.startswith(_INTERNAL)}


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
