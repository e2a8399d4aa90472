"""XPlane profiles (`*.xplane.pb`, also gzipped) as tables.

The messages are XSpace > XPlane > XLine > XEvent > XStat of tsl/profiler/protobuf/xplane.proto.
It knows the fields and the units, not what an event means.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from meshscope.readers.profile.faults import TraceError
from meshscope.readers.profile.plane import Plane, plane_of
from meshscope.readers.profile.source import ProfileBytes, check_limit, read_bytes
from meshscope.readers.profile.stats import expect
from meshscope.readers.profile.wire import SPAN, WireError, fields

MAX_PLANES = 10_000

_PLANE, _ERROR, _WARNING, _HOST = 1, 2, 3, 4
_WIRES: dict[int, int] = dict.fromkeys((_PLANE, _ERROR, _WARNING, _HOST), SPAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class XSpace:
    """What one host recorded; `n_bytes` is the size of the profile, unpacked."""

    path: Path
    host: str
    planes: tuple[Plane, ...]
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    n_bytes: int


def read_xspace(path: Path, *, stats: Collection[str] | None = None) -> XSpace:
    """One host's profile; `stats` names the stats of events to keep (None: all).

    TraceError where the file is none, is damaged or cut short, or exceeds the limits.
    """
    file = read_bytes(path, stats)
    try:
        return _xspace(path, file)
    except WireError as error:
        raise TraceError(
            f"{path}: damaged or cut short: at byte {error.position:,} of {len(file.data):,}, {error.what}. "
            "Record the profile again, or copy the file again and compare its size with the original."
        ) from error


def host_of(path: Path) -> str:
    """The host that wrote the file: `HOST.xplane.pb`."""
    return path.name.removesuffix(".gz").removesuffix(".pb").removesuffix(".xplane")


def _xspace(path: Path, file: ProfileBytes) -> XSpace:
    texts: dict[int, list[str]] = {_ERROR: [], _WARNING: [], _HOST: []}
    planes: list[Plane] = []
    for part in fields(file.data, 0, len(file.data)):
        expect(part.number, part.wire, _WIRES, part.value)
        if part.number == _PLANE:
            planes.append(plane_of(file, part.value, part.end))
            check_limit(path, "planes", len(planes), MAX_PLANES)
        elif part.number in texts:
            texts[part.number].append(file.text(part.value, part.end))
    if not planes:
        raise WireError("there is no plane", 0)
    return XSpace(
        path=path,
        host=texts[_HOST][0] if len(texts[_HOST]) == 1 else host_of(path),
        planes=tuple(planes),
        errors=tuple(texts[_ERROR]),
        warnings=tuple(texts[_WARNING]),
        n_bytes=len(file.data),
    )
