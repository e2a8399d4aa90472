"""A profile as a timeline: one track per line of each plane, all hosts on one clock."""

import re
from collections.abc import Iterator

import polars as pl

from meshscope.events.timeline import ARGUMENT, MAX_CHARACTERS, Timeline, Track, printable
from meshscope.readers.profile.ops import zero_ns
from meshscope.readers.profile.plane import PREFIX, Plane
from meshscope.readers.profile.xplane import Profile

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
    planes: list[tuple[str, int, Plane]] = []  # the process, and its origin in ps
    for (name, offset_s), space in zip(
        profile.hosts.select("name", "offset_s").iter_rows(), profile.spaces, strict=True
    ):
        prefix = f"{name} " if len(profile.spaces) > 1 else ""
        zero, offset_ps = zero_ns(space), round(offset_s * 1e12)
        planes += [
            (printable(prefix + plane.name), (plane.origin_ns - zero) * 1000 + offset_ps, plane)
            for plane in space.planes
            if len(plane.events)
        ]
    earliest_ps = [base + int(plane.events["start_ps"].min()) for _, base, plane in planes]  # type: ignore[arg-type]
    for pid, (process, base_ps, plane) in enumerate(planes, start=1):
        kinds, arguments = _kinds(plane), _arguments(plane.events)
        start_ps = pl.col("start_ps") + (base_ps - min(0, *earliest_ps))
        for line, name in enumerate(plane.lines):
            events = plane.events.filter(pl.col("line") == line)
            if len(events):
                yield Track(
                    pid=pid,
                    process=process,
                    tid=line + 1,
                    thread=printable(name),
                    parents=(process,),
                    kinds=kinds,
                    slices=events.select("kind", start_ps, "dur_ps", *arguments).rename(arguments),
                )


def _kinds(plane: Plane) -> pl.DataFrame:
    """Kinds named as the TPU profiler shows them: the op, with its HLO line as `long_name`."""
    arguments = _arguments(plane.kinds)
    shown: list[str] = []
    for name, display_name in plane.kinds.select("name", "display_name").iter_rows():
        line = _HLO_NAME.match(name[:MAX_CHARACTERS])
        shown.append(display_name or (line[1] if line else name))
    label = pl.Series("name", shown, dtype=pl.String)
    long_name = pl.when(pl.col("name") != label).then("name").alias(ARGUMENT + "long_name")
    return plane.kinds.select("kind", *arguments, label, long_name).rename(arguments)


def _arguments(frame: pl.DataFrame) -> dict[str, str]:
    """The columns of stats worth showing, with their names as arguments."""
    stats = [c.removeprefix(PREFIX) for c in frame.columns if c.startswith(PREFIX)]
    return {PREFIX + s: ARGUMENT + s for s in stats if not s.startswith(_INTERNAL)}
