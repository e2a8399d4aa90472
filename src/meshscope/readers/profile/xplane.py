"""Reads XPlane profiles (`*.xplane.pb`, also gzipped) into tables, and the HLO of their programs as text.

The messages are XSpace > XPlane > XLine > XEvent > XStat of tsl/profiler/protobuf/xplane.proto.
This reader exists next to `jax.profiler.ProfileData` because profiles must be readable without JAX,
because files may be hostile, and because columns are faster: one million events of four TPU chips
(38 MB) take 0.6 s and 120 MB instead of 5.3 s and 1,100 MB, those of eight CPU devices (50 MB)
0.9 s and 145 MB instead of 6.4 s and 1,430 MB (JAX 0.10.2, two CPU cores, names, times and stats
read in both). `tests/profile/test_against_jax.py` checks that both readers agree.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshscope.errors import TraceError
from meshscope.readers.profile.hlo_proto import hlo_text
from meshscope.readers.profile.plane import Plane, ProfileBytes, check_limit, plane_of, read_bytes
from meshscope.readers.profile.wire import Message, WireError

MAX_PLANES = 10_000
SAMPLE_BYTES = 1 << 20  # enough of a damaged file to see what changed it
MIN_MARKS = 8  # replaced characters that do not occur by chance

_PLANE, _ERROR, _WARNING, _HOST = 1, 2, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class XSpace:
    """The profile of one host; `n_bytes` is its unpacked size."""

    path: Path
    host: str
    planes: tuple[Plane, ...]
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    n_bytes: int


def read_xspace(path: Path, *, stats: Collection[str] | None = None) -> XSpace:
    """Reads the profile of one host; `stats` lists the stats of events to keep (None: all).

    TraceError if the file is not a profile, is damaged or truncated, or exceeds the limits.
    """
    file = read_bytes(path, stats)
    try:
        return _xspace(path, file)
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


def _xspace(path: Path, file: ProfileBytes) -> XSpace:
    message = Message(file.data)
    plane_spans = message.spans(_PLANE)
    check_limit(path, "planes", len(plane_spans), MAX_PLANES)
    if not len(plane_spans):
        raise WireError("the file has no plane", 0)
    hosts = message.texts(_HOST)
    return XSpace(
        path=path,
        host=hosts[0] if len(hosts) == 1 else host_of(path),
        planes=tuple(
            plane_of(file, int(start), int(end))
            for start, end in zip(*plane_spans.chunk(), strict=True)
        ),
        errors=tuple(message.texts(_ERROR)),
        warnings=tuple(message.texts(_WARNING)),
        n_bytes=len(file.data),
    )


METADATA_PLANE = "/host:metadata"
_HLO_PROTO = 6  # the value of a stat that is bytes


def read_programs(path: Path, *, n_devices: int = 1) -> tuple[dict[str, str], list[str]]:
    """HLO text of the programs by `module(program id)`, and a finding for each damaged one.

    `n_devices` applies to programs that do not say for how many devices they are.
    TraceError if the file cannot be read.
    """
    file = read_bytes(path, ())
    texts: dict[str, str] = {}
    findings: list[str] = []
    try:
        for name, content in _protos(file):
            try:
                texts[name] = hlo_text(Message(content), n_devices=n_devices)
            except WireError as error:
                findings.append(f"the HLO of program '{name[:200]}' is damaged: {error.reason}")
    except WireError as error:
        raise TraceError(f"{path}: damaged or truncated: {error.reason}. Copy it again.") from error
    return texts, findings


def _protos(file: ProfileBytes) -> Iterator[tuple[str, bytes]]:
    """Names and HloProtos of the programs: stats of the kinds of events of the plane."""
    for plane in Message(file.data).messages(1):
        if plane.text(2) == METADATA_PLANE:
            for kind in (kind for entry in plane.messages(4) for kind in entry.messages(2)):
                for stat in kind.messages(5):
                    for content in stat.contents(_HLO_PROTO):
                        yield kind.text(2), bytes(content)
