"""A profile of several hosts in one view: which files belong together, one clock, one numbering.

Clocks. Every host counts from the start of its own profile, which it stamps with its own Unix
time. Where hosts share collectives, a collective ends at the same moment on all its participants,
to within some microseconds, and the median difference of the ends is taken as the difference of
the clocks. Else the stamps are believed (NTP keeps them to milliseconds), and without stamps the
profiles are laid start on start. `Profile.hosts` says which it was.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.readers.profile.ops import UNIX_NS, Ops, merged, ops_of, zero_ns
from meshscope.readers.profile.xplane import XSpace, read_xspace

SUFFIXES = (".xplane.pb", ".xplane.pb.gz")
CPU_IDS_A_PROCESS = 2048  # JAX: a CPU device's id is 2048 x process + number (xla/pjrt/cpu)
MIN_SHARED = 3  # collectives that two hosts must share before their ends set the clock

HOSTS_SCHEMA: dict[str, type[pl.DataType]] = {
    "host": pl.UInt16,
    "name": pl.String,
    "path": pl.String,
    "offset_s": pl.Float64,  # added to the host's own times
    "clock": pl.String,  # how the offset was found
    "n_devices": pl.Int32,
    "numbering": pl.String,  # how the numbers that the host gives its devices became positions
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What all hosts recorded: `hosts` by HOSTS_SCHEMA, `spaces` in its order, `ops` on one clock."""

    hosts: pl.DataFrame
    spaces: tuple[XSpace, ...]
    ops: Ops


def read_profile(
    *paths: Path,
    stats: Collection[str] | None = None,
    positions: Mapping[tuple[int, int], int] | None = None,
) -> Profile:
    """The profile in files, in a session's folder, or the latest session below a log folder.

    `positions` gives the position in the mesh of each (row of the host, device number there);
    groups of collectives name devices so. Without it, hosts that all count from 0 are numbered on
    in the order of the files, the ids that JAX gives CPU devices (2048 for each process) are
    closed up, and other numbers are kept. TraceError where a device has no position.
    """
    files = [file for path in paths for file in profile_files(path)]
    spaces = tuple(read_xspace(file, stats=stats) for file in files)
    parts = [ops_of(space, host=index) for index, space in enumerate(spaces)]
    own = [part.events["device"].drop_nulls().unique().sort().to_list() for part in parts]
    numbering = "given"
    if positions is None:
        positions, numbering = _positions(own)
    ops = merged([_numbered(part, host, positions) for host, part in enumerate(parts)])
    offsets = _by_collectives(ops, _by_stamps(spaces))
    hosts = pl.DataFrame(
        {
            "host": list(range(len(spaces))),
            "name": _distinct([space.host for space in spaces]),
            "path": [str(space.path) for space in spaces],
            "offset_s": [offset_s for offset_s, _ in offsets],
            "clock": [words for _, words in offsets],
            "n_devices": [len(devices) for devices in own],
            "numbering": [numbering] * len(spaces),
        },
        schema=HOSTS_SCHEMA,
    )
    return Profile(hosts=hosts, spaces=spaces, ops=_shifted(ops, hosts))


def profile_files(path: Path) -> list[Path]:
    """The files of the hosts of one session, sorted by name; TraceError where there is none."""
    if not path.is_dir():
        return [path]
    for folder in (path, *sorted(path.glob("plugins/profile/*"), reverse=True)):
        files = {_host(file): file for file in sorted(folder.glob("*.xplane.pb*"), reverse=True)}
        if files:
            return sorted(file for file in files.values() if file.name.endswith(SUFFIXES))
    raise TraceError(
        f"{path}: holds no profile: no *.xplane.pb in it, nor below plugins/profile/<time>/. "
        "Give the folder that jax.profiler.trace wrote to, or a file itself."
    )


def _host(file: Path) -> str:
    return file.name.removesuffix(".gz")


def _distinct(names: list[str]) -> list[str]:
    """The names; where two processes of one machine have the same, with their number."""
    return [
        name if names.count(name) == 1 else f"{name}#{names[:index].count(name)}"
        for index, name in enumerate(names)
    ]


def _positions(own: Sequence[Sequence[int]]) -> tuple[dict[tuple[int, int], int], str]:
    """Positions by (host, device number), and the words for how they were found."""
    every = [(host, device) for host, devices in enumerate(own) for device in devices]
    numbers = [device for _, device in every]
    if len(set(numbers)) < len(numbers):
        firsts = np.cumsum([0, *(max(devices, default=-1) + 1 for devices in own[:-1])]).tolist()
        return {key: firsts[key[0]] + key[1] for key in every}, "hosts in the order of the files"
    if max(numbers, default=0) < CPU_IDS_A_PROCESS:
        return {key: key[1] for key in every}, "as recorded"
    closed_up = {device: rank for rank, device in enumerate(sorted(numbers))}
    return {key: closed_up[key[1]] for key in every}, "ids of CPU devices, closed up"


def _numbered(part: Ops, host: int, positions: Mapping[tuple[int, int], int]) -> Ops:
    own = part.events["device"].drop_nulls().unique().to_list()
    missing = [device for device in own if (host, device) not in positions]
    if missing:
        raise TraceError(
            f"device {missing[0]} of host {host} has no position; positions are given for "
            f"{sorted(positions)}. Give one for each device that the host recorded: {sorted(own)}."
        )
    new = pl.Series([positions[host, device] for device in own], dtype=pl.Int32)
    old = pl.Series(own, dtype=pl.Int32)
    device = pl.col("device").replace_strict(old, new, default=None, return_dtype=pl.Int32)
    return Ops(events=part.events.with_columns(device), instructions=part.instructions)


def _by_stamps(spaces: Sequence[XSpace]) -> list[tuple[float, str]]:
    """Offsets in s from the earliest start, by the Unix time of each host's profile."""
    starts = [_start_unix_ns(space) for space in spaces]
    if len(spaces) == 1:
        return [(0.0, "one host")]
    known = [start for start in starts if start is not None]
    if len(known) < len(starts):
        return [(0.0, "start of the profile, laid on that of the other hosts")] * len(starts)
    is_one_machine = len({space.host for space in spaces}) == 1
    words = "Unix time of the one machine" if is_one_machine else "Unix time of the host"
    return [((start - min(known)) * 1e-9, words) for start in known]


def _start_unix_ns(space: XSpace) -> int | None:
    """When the profile began, in ns since 1970; None where it does not tell."""
    if (zero := zero_ns(space)) > UNIX_NS:
        return zero
    for plane in space.planes:
        start = plane.stats.get("profile_start_time")
        if isinstance(start, int):
            return start
    return None


def _by_collectives(ops: Ops, stamped: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """The offsets, bettered where hosts share collectives, starting from the first host."""
    ends = _shared_ends(ops) if len(stamped) > 1 else {}
    offsets = list(stamped)
    settled, waiting = [0], list(range(1, len(stamped)))
    while waiting:
        found = next(
            ((a, b) for a in settled for b in waiting if len(ends.get((a, b), ())) >= MIN_SHARED),
            None,
        )
        if found is None:
            return offsets
        reference, host = found
        apart = ends[reference, host]
        offset_s = offsets[reference][0] + float(np.median(apart))
        spread_us = float(np.ptp(apart)) / 2 * 1e6
        words = f"ends of {len(apart)} shared collectives, within {spread_us:.1f} us"
        offsets[host] = (offset_s, words)
        settled.append(host)
        waiting.remove(host)
    return offsets


def _shared_ends(ops: Ops) -> Mapping[tuple[int, int], np.ndarray]:
    """For pairs of hosts: how much earlier the second's clock shows the ends of shared collectives."""
    spanning = ops.instructions.filter(pl.col("kind").is_not_null()).select(
        "op", "groups", pl.col("opcode").str.ends_with("-start").alias("is_start")
    )
    events = ops.events.filter(pl.col("role") == "leaf").join(spanning, on="op")
    events = events.filter(~pl.col("is_start").fill_null(value=False)).sort("start_s")
    ends = events.with_columns(
        pl.int_range(pl.len()).over("op", "device").alias("occurrence"),
        (pl.col("start_s") + pl.col("dur_s")).alias("end_s"),
        _group_of(events).alias("group"),
    ).filter(pl.col("group").is_not_null())
    last = ends.group_by("op", "occurrence", "group", "host").agg(pl.col("end_s").max())
    both = last.join(last, on=["op", "occurrence", "group"], suffix="_other")
    both = both.filter(pl.col("host") != pl.col("host_other")).with_columns(
        (pl.col("end_s") - pl.col("end_s_other")).alias("apart_s")
    )
    pairs = both.group_by("host", "host_other").agg("apart_s")
    return {(a, b): np.array(apart) for a, b, apart in pairs.iter_rows()}


def _group_of(events: pl.DataFrame) -> pl.Series:
    """The group, as text, that holds the device of each event; null where groups are not known."""
    found: dict[tuple[int, int], str | None] = {}
    for op, device, groups in (
        events.select("op", "device", "groups").unique(["op", "device"]).iter_rows()
    ):
        own = [group for group in groups or [] if device in group]
        found[op, device] = ",".join(map(str, own[0])) if own else None
    keys = events.select("op", "device").iter_rows()
    return pl.Series([found[key] for key in keys], dtype=pl.String)


def _shifted(ops: Ops, hosts: pl.DataFrame) -> Ops:
    shifts = hosts["offset_s"].gather(ops.events["host"].cast(pl.UInt32))
    events = ops.events.with_columns(pl.col("start_s") + shifts)
    return Ops(events=events, instructions=ops.instructions)
