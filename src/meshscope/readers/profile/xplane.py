"""Reads XPlane profiles (`*.xplane.pb`, also gzipped) of one host, or of all hosts of a session.

The messages are XSpace > XPlane > XLine > XEvent > XStat of tsl/profiler/protobuf/xplane.proto.
This reader exists next to `jax.profiler.ProfileData` because profiles must be readable without JAX,
because files may be hostile, and because columns are faster: one million events of four TPU chips
(38 MB) take 0.6 s and 120 MB instead of 5.3 s and 1,100 MB; for eight CPU devices (50 MB)
0.9 s and 145 MB instead of 6.4 s and 1,430 MB (JAX 0.10.2, two CPU cores, names, times and stats
read in both). `tests/profile/test_against_jax.py` checks that both readers agree.

In a session, every host counts from the start of its profile, which it stamps with its Unix time. Shared
collectives set the clocks of hosts, else the stamps (NTP keeps them within milliseconds); without stamps
all profiles start together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.readers.profile.hlo_proto import hlo_text
from meshscope.readers.profile.ops import UNIX_NS, Ops, merged, ops_of, own_groups, zero_ns
from meshscope.readers.profile.plane import Plane, XSpace, check_limit, plane_of, read_bytes
from meshscope.readers.profile.wire import Message, WireError
from meshscope.readers.traces.merge import collective_ends, skews

MAX_PLANES = 10_000
SAMPLE_BYTES = 1 << 20  # enough of a damaged file to see what changed it
MIN_MARKS = 8  # replaced characters that do not occur by chance

_PLANE, _ERROR, _WARNING, _HOST = 1, 2, 3, 4


def read_xspace(path: Path) -> XSpace:
    """The profile of one host; TraceError for other files, damaged ones and those beyond the limits."""
    file = read_bytes(path)
    try:
        message = Message(file.data)
        hosts, spans = message.texts(_HOST), message.spans(_PLANE)
        check_limit(path, "planes", len(spans), MAX_PLANES)
        if not len(spans):
            raise WireError("the file has no plane")  # noqa: TRY301  it ends as other damage
        return XSpace(
            path=path,
            host=hosts[0] if len(hosts) == 1 else host_of(path),
            planes=tuple(
                plane_of(file, *map(int, bounds)) for bounds in zip(*spans.chunk(), strict=True)
            ),
            errors=tuple(message.texts(_ERROR)),
            warnings=tuple(message.texts(_WARNING)),
        )
    except WireError as error:
        position = min(error.position, len(file.data))
        raise TraceError(
            f"{path}: damaged or truncated at byte {position:,} of {len(file.data):,}: {error.reason}. "
            f"{_remedy(bytes(file.data[:SAMPLE_BYTES]))}"
        ) from error


def _remedy(start: bytes) -> str:
    """What to do about a damaged file; bytes that were treated as text leave traces at its start."""
    is_replaced = start.count(b"\xef\xbf\xbd") > MIN_MARKS
    n_lines = start.count(b"\n")
    if is_replaced or (n_lines > MIN_MARKS and start.count(b"\r\n") == n_lines):
        return (
            "Its bytes were changed as if they were text, by an editor or a transfer in text mode. "
            "Copy the original as a binary file."
        )
    return (
        "Record the profile again, or copy the file again and compare its size with the original."
    )


def host_of(path: Path) -> str:
    """The name of the host that wrote the file `HOST.xplane.pb`."""
    return path.name.removesuffix(".gz").removesuffix(".pb").removesuffix(".xplane")


METADATA_PLANE = "/host:metadata"
_HLO_PROTO = 6  # the value of a stat that is bytes


def read_programs(path: Path) -> tuple[dict[str, str], list[str]]:
    """HLO text of the programs by `module(program id)`, and a finding for each damaged one.

    They are stats of kinds of events. TraceError if the file cannot be read.
    """
    texts: dict[str, str] = {}
    findings: list[str] = []
    try:
        planes = Message(read_bytes(path).data).messages(_PLANE)
        entries = (e for p in planes if p.text(2) == METADATA_PLANE for e in p.messages(4))
        for kind in (kind for entry in entries for kind in entry.messages(2)):
            for proto in (c for stat in kind.messages(5) for c in stat.contents(_HLO_PROTO)):
                try:
                    texts[kind.text(2)] = hlo_text(Message(proto))
                except WireError as error:
                    name = kind.text(2)[:200]
                    findings.append(f"the HLO of program '{name}' is damaged: {error.reason}")
    except WireError as error:
        raise TraceError(f"{path}: damaged or truncated: {error.reason}. Copy it again.") from error
    return texts, findings


CPU_IDS_A_PROCESS = 2048  # JAX: the id of a CPU device is 2048 x process + number (xla/pjrt/cpu)


class HostClock(NamedTuple):
    """What was added to the times of a host, and the method in words."""

    offset_s: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile of all hosts, `spaces` in their order, and `ops` on one clock.

    `positions` map the numbers of each host's devices to those in `ops`.
    """

    clocks: tuple[HostClock, ...]
    positions: tuple[Mapping[int, int], ...]
    spaces: tuple[XSpace, ...]
    ops: Ops

    def planes(self) -> Iterator[tuple[int, int, Plane, float]]:
        """Host, index on the host, plane, and the time of its origin in s on the clock of `ops`."""
        for host, space in enumerate(self.spaces):
            zero, offset_s = zero_ns(space), self.clocks[host].offset_s
            for index, plane in enumerate(space.planes):
                yield host, index, plane, (plane.origin_ns - zero) * 1e-9 + offset_s


def read_profile(path: Path, *, positions: Mapping[int, int] | None = None) -> Profile:
    """Reads the profile of one host, or the profiles of all hosts in a folder.

    `positions` maps the device numbers of the only host to positions in the mesh, by which groups of
    collectives name devices. Without it, hosts that all count from 0 are numbered consecutively in
    the order of the files, ids of CPU devices (2048 per process) are compacted, and other numbers
    are kept. TraceError if a device has no position.
    """
    files = sorted(path.glob("*.xplane.pb")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: contains no *.xplane.pb. Record the profile again.")
    return profile_of([read_xspace(file) for file in files], positions=positions)


def profile_of(spaces: Sequence[XSpace], *, positions: Mapping[int, int] | None = None) -> Profile:
    """The profile of these hosts; `positions` and errors as for `read_profile`."""
    parts = [ops_of(space, host=index) for index, space in enumerate(spaces)]
    devices = [part.events["device"].drop_nulls().unique().sort().to_list() for part in parts]
    places = _places(devices) if positions is None else [positions]
    if missing := {number for of_host in devices for number in of_host} - set().union(*places):
        raise TraceError(
            f"device {min(missing)} has no position; there are positions for {sorted(places[0])}. "
            "Give one for each recorded device."
        )
    ops = merged(
        [
            Ops(
                events=part.events.with_columns(pl.col("device").replace(of_host)),
                instructions=part.instructions,
            )
            for part, of_host in zip(parts, places, strict=True)
        ]
    )
    clocks = _by_collectives(ops, _by_stamps(spaces))
    shifts = pl.Series([clock.offset_s for clock in clocks], dtype=pl.Float64)
    start_s = pl.col("start_s") + shifts.gather(ops.events["host"].cast(pl.UInt32))
    ops = Ops(events=ops.events.with_columns(start_s), instructions=ops.instructions)
    return Profile(clocks=tuple(clocks), positions=tuple(places), spaces=tuple(spaces), ops=ops)


def _places(devices: Sequence[Sequence[int]]) -> list[dict[int, int]]:
    numbers = sorted(device for on_host in devices for device in on_host)
    if len(set(numbers)) < len(numbers):  # hosts in the order of the files
        firsts = np.cumsum([0, *(max(on_host, default=-1) + 1 for on_host in devices)]).tolist()
        return [
            {device: first + device for device in on_host}
            for first, on_host in zip(firsts, devices, strict=False)
        ]
    is_kept = max(numbers, default=0) < CPU_IDS_A_PROCESS
    return [{d: d if is_kept else numbers.index(d) for d in on_host} for on_host in devices]


def _by_stamps(spaces: Sequence[XSpace]) -> list[HostClock]:
    """Offsets from the earliest profile, by Unix time."""
    if len(spaces) == 1:
        return [HostClock(0.0, "one host")]
    starts = [start_unix_ns(space) for space in spaces]
    known = [start for start in starts if start is not None]
    if len(known) < len(starts):
        unknown = HostClock(0.0, "start of the profile, aligned with the other hosts")
        return [unknown] * len(starts)
    is_one_machine = len({space.host for space in spaces}) == 1
    method = "Unix time of the one machine" if is_one_machine else "Unix time of the host"
    return [HostClock((start - min(known)) * 1e-9, method) for start in known]


def start_unix_ns(space: XSpace) -> int | None:
    """Start of the profile in ns since 1970; None if it has no stamp."""
    if (zero := zero_ns(space)) > UNIX_NS:
        return zero
    stamps = (plane.stats.get("profile_start_time") for plane in space.planes)
    return next((stamp for stamp in stamps if isinstance(stamp, int)), None)


def _by_collectives(ops: Ops, stamped: Sequence[HostClock]) -> list[HostClock]:
    """The clocks, set by shared collectives if hosts have enough."""
    if len(stamped) == 1:
        return list(stamped)
    is_start = pl.col("opcode").str.ends_with("-start").fill_null(value=False)
    collectives = ops.instructions.filter(pl.col("kind").is_not_null(), ~is_start)
    events = ops.events.filter(pl.col("role") == "leaf").join(
        collectives.select("op", "groups"), on="op"
    )
    of_place = own_groups(events.unique(["op", "device"]), "op", "device")
    group = pl.col("group").cast(pl.List(pl.String)).list.join(",")
    placed = (
        events.sort("start_s")
        .join(of_place, on=["op", "device"], maintain_order="left")
        .with_columns(group, start="start_s", dur="dur_s")
    )
    of_hosts = [placed.filter(pl.col("host") == host) for host in range(len(stamped))]
    apart = skews([collective_ends(of_host, ("op", "group")) for of_host in of_hosts])
    clocks = [stamped[0]]
    for clock, skew in zip(stamped[1:], apart[1:], strict=True):
        if skew is not None:
            within = f"within {skew.spread * 1e6:.1f} us"
            method = f"ends of {skew.n_shared} shared collectives, {within}"
            clock = HostClock(stamped[0].offset_s + skew.offset, method)  # noqa: PLW2901
        clocks.append(clock)
    return clocks
