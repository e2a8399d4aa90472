"""Reads the profiles of all hosts of a session with one clock and one device numbering.

Every host counts from the start of its profile, which it stamps with its Unix time. A collective
ends at the same time on all participants, within some microseconds. So if two hosts share
collectives, the median difference of their ends is the offset of their clocks. Otherwise the stamps
give the offset (NTP keeps them within milliseconds); without stamps all profiles start together.
`Profile.hosts` says which method applied.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.readers.profile.ops import UNIX_NS, Ops, merged, ops_of, zero_ns
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.xplane import XSpace, read_xspace

SUFFIXES = (".xplane.pb", ".xplane.pb.gz")
CPU_IDS_A_PROCESS = 2048  # JAX: the id of a CPU device is 2048 x process + number (xla/pjrt/cpu)
MIN_SHARED = 3  # shared collectives needed to set the clock by their ends

HOSTS_SCHEMA: dict[str, type[pl.DataType]] = {
    "host": pl.UInt16,
    "name": pl.String,
    "path": pl.String,
    "offset_s": pl.Float64,  # added to the times of the host
    "clock": pl.String,  # how the offset was determined
    "n_devices": pl.Int32,
    "numbering": pl.String,  # how device numbers became positions
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile of all hosts: `hosts` by HOSTS_SCHEMA, `spaces` in its order, `ops` on one clock."""

    hosts: pl.DataFrame
    spaces: tuple[XSpace, ...]
    ops: Ops

    def planes(self) -> Iterator[tuple[int, int, Plane, float]]:
        """Host, index on the host, plane, and the time of its origin in s on the clock of `ops`."""
        offsets_s = self.hosts["offset_s"].to_list()
        for host, space in enumerate(self.spaces):
            zero = zero_ns(space)
            for index, plane in enumerate(space.planes):
                yield host, index, plane, (plane.origin_ns - zero) * 1e-9 + offsets_s[host]


def read_profile(
    *paths: Path,
    stats: Collection[str] | None = None,
    positions: Mapping[tuple[int, int], int] | None = None,
) -> Profile:
    """Reads profile files, a session folder, or the latest session of a log folder.

    `positions` maps (host row, device number on the host) to the position in the mesh, by which
    groups of collectives name devices. Without it, hosts that all count from 0 are numbered
    consecutively in the order of the files, ids of CPU devices (2048 per process) are compacted,
    and other numbers are kept. TraceError if a device has no position.
    """
    files = [file for path in paths for file in profile_files(path)]
    return profile_of([read_xspace(file, stats=stats) for file in files], positions=positions)


def profile_of(
    spaces: Sequence[XSpace], *, positions: Mapping[tuple[int, int], int] | None = None
) -> Profile:
    """The profile of these hosts; `positions` and errors as for `read_profile`."""
    parts = [ops_of(space, host=index) for index, space in enumerate(spaces)]
    devices = [part.events["device"].drop_nulls().unique().sort().to_list() for part in parts]
    numbering = "given"
    if positions is None:
        positions, numbering = _positions(devices)
    ops = merged([_numbered(part, host, positions) for host, part in enumerate(parts)])
    offsets = _by_collectives(ops, _by_stamps(spaces))
    hosts = pl.DataFrame(
        {
            "host": list(range(len(spaces))),
            "name": _distinct([space.host for space in spaces]),
            "path": [str(space.path) for space in spaces],
            "offset_s": [offset_s for offset_s, _ in offsets],
            "clock": [method for _, method in offsets],
            "n_devices": [len(on_host) for on_host in devices],
            "numbering": [numbering] * len(spaces),
        },
        schema=HOSTS_SCHEMA,
    )
    return Profile(hosts=hosts, spaces=tuple(spaces), ops=_shifted(ops, hosts))


def profile_files(path: Path) -> list[Path]:
    """The profile files of one session, sorted by name; TraceError if there are none."""
    if not path.is_dir():
        return [path]
    for folder in (path, *sorted(path.glob("plugins/profile/*"), reverse=True)):
        files = {
            file.name.removesuffix(".gz"): file
            for file in sorted(folder.glob("*.xplane.pb*"), reverse=True)
        }
        if files:
            return sorted(file for file in files.values() if file.name.endswith(SUFFIXES))
    raise TraceError(
        f"{path}: contains no *.xplane.pb, and neither does plugins/profile/<time>/. "
        "Give the folder that jax.profiler.trace wrote, or a profile file."
    )


def _distinct(names: list[str]) -> list[str]:
    """The names; processes of one machine get numbers."""
    return [
        name if names.count(name) == 1 else f"{name}#{names[:index].count(name)}"
        for index, name in enumerate(names)
    ]


def _positions(
    devices: Sequence[Sequence[int]],
) -> tuple[dict[tuple[int, int], int], str]:
    """Positions by (host, device number), and the method in words."""
    keys = [(host, device) for host, on_host in enumerate(devices) for device in on_host]
    numbers = [device for _, device in keys]
    if len(set(numbers)) < len(numbers):
        firsts = np.cumsum(
            [0, *(max(on_host, default=-1) + 1 for on_host in devices[:-1])]
        ).tolist()
        return {key: firsts[key[0]] + key[1] for key in keys}, "hosts in the order of the files"
    if max(numbers, default=0) < CPU_IDS_A_PROCESS:
        return {key: key[1] for key in keys}, "as recorded"
    compacted = {device: rank for rank, device in enumerate(sorted(numbers))}
    return {key: compacted[key[1]] for key in keys}, "ids of CPU devices, compacted"


def _numbered(part: Ops, host: int, positions: Mapping[tuple[int, int], int]) -> Ops:
    devices = part.events["device"].drop_nulls().unique().to_list()
    missing = [device for device in devices if (host, device) not in positions]
    if missing:
        raise TraceError(
            f"device {missing[0]} of host {host} has no position; there are positions for "
            f"{sorted(positions)}. Give one for each recorded device: {sorted(devices)}."
        )
    new = pl.Series([positions[host, device] for device in devices], dtype=pl.Int32)
    old = pl.Series(devices, dtype=pl.Int32)
    device = pl.col("device").replace_strict(old, new, default=None, return_dtype=pl.Int32)
    return Ops(events=part.events.with_columns(device), instructions=part.instructions)


def _by_stamps(spaces: Sequence[XSpace]) -> list[tuple[float, str]]:
    """Offsets in s from the earliest profile, by Unix time, and the method in words."""
    starts = [start_unix_ns(space) for space in spaces]
    if len(spaces) == 1:
        return [(0.0, "one host")]
    known = [start for start in starts if start is not None]
    if len(known) < len(starts):
        return [(0.0, "start of the profile, aligned with the other hosts")] * len(starts)
    is_one_machine = len({space.host for space in spaces}) == 1
    method = "Unix time of the one machine" if is_one_machine else "Unix time of the host"
    return [((start - min(known)) * 1e-9, method) for start in known]


def start_unix_ns(space: XSpace) -> int | None:
    """Start of the profile in ns since 1970; None if it has no stamp."""
    if (zero := zero_ns(space)) > UNIX_NS:
        return zero
    for plane in space.planes:
        start = plane.stats.get("profile_start_time")
        if isinstance(start, int):
            return start
    return None


def _by_collectives(ops: Ops, stamped: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """The offsets, refined host by host from shared collectives, starting at the first host."""
    ends = _shared_ends(ops) if len(stamped) > 1 else {}
    offsets = list(stamped)
    settled, waiting = [0], list(range(1, len(stamped)))
    while waiting:
        pair = next(
            ((a, b) for a in settled for b in waiting if len(ends.get((a, b), ())) >= MIN_SHARED),
            None,
        )
        if pair is None:
            return offsets
        reference, host = pair
        apart = ends[reference, host]
        offset_s = offsets[reference][0] + float(np.median(apart))
        spread_us = float(np.ptp(apart)) / 2 * 1e6
        method = f"ends of {len(apart)} shared collectives, within {spread_us:.1f} us"
        offsets[host] = (offset_s, method)
        settled.append(host)
        waiting.remove(host)
    return offsets


def _shared_ends(ops: Ops) -> Mapping[tuple[int, int], np.ndarray]:
    """For each pair of hosts, the differences in s between the ends of shared collectives."""
    collectives = ops.instructions.filter(pl.col("kind").is_not_null()).select(
        "op", "groups", pl.col("opcode").str.ends_with("-start").alias("is_start")
    )
    events = ops.events.filter(pl.col("role") == "leaf").join(collectives, on="op")
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
    """The group that contains the device of each event, as text; null if unknown."""
    group_texts: dict[tuple[int, int], str | None] = {}
    for op, device, groups in (
        events.select("op", "device", "groups").unique(["op", "device"]).iter_rows()
    ):
        matches = [group for group in groups or [] if device in group]
        group_texts[op, device] = ",".join(map(str, matches[0])) if matches else None
    keys = events.select("op", "device").iter_rows()
    return pl.Series([group_texts[key] for key in keys], dtype=pl.String)


def _shifted(ops: Ops, hosts: pl.DataFrame) -> Ops:
    shifts = hosts["offset_s"].gather(ops.events["host"].cast(pl.UInt32))
    events = ops.events.with_columns(pl.col("start_s") + shifts)
    return Ops(events=events, instructions=ops.instructions)
