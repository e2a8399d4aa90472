"""Timed collectives, measured by calibration or read from a CSV file, with nccl-tests' bandwidths."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from meshscope.errors import ParseError, SpecError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, wire_factor
from meshscope.files import read_file
from meshscope.hardware.chips import chip_of
from meshscope.hardware.topology import Topology
from meshscope.plans.mesh import Mesh
from meshscope.units import array_bytes, dtype_name

KINDS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.PERMUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCollective:
    """Seconds of one collective over a mesh axis; `repeats_s` are the single measurements."""

    axis: str
    groups: Groups
    kind: Kind
    payload_bytes: int
    seconds: float
    repeats_s: tuple[float, ...] = ()

    @property
    def group_size(self) -> int:
        """Devices of a group; 2 for a permute, whose groups are pairs."""
        return len(self.groups[0])

    @property
    def algbw_bytes_per_s(self) -> float:
        """nccl-tests' algorithm bandwidth: payload / time (PERFORMANCE.md)."""
        return self.payload_bytes / self.seconds

    @property
    def busbw_bytes_per_s(self) -> float:
        """nccl-tests' bus bandwidth: algbw x 2(n-1)/n for all-reduce, (n-1)/n, or 1 (PERFORMANCE.md)."""
        return self.algbw_bytes_per_s * float(wire_factor(self.kind, self.group_size))


def ring_pairs(groups: Groups) -> Groups:
    """The (source, target) pairs of a permute that shifts each group by one."""
    return tuple(
        pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPoints:
    """The points of one chip in a file, and the reasons for skipped rows."""

    points: tuple[TimedCollective, ...]
    skipped: tuple[str, ...]
    n_of_other_chips: int


# Meanings of a payload that follow the nccl-tests rule without conversion.
_NCCL_PAYLOADS = frozenset(
    {"", "output", "input", "full buffer", "buffer", "buffers", "local buffer", "matrix"}
)
_PER_DEVICE = "per device"
_REQUIRED = ("chip", "group_size", "payload_bytes")


def read_points(path: Path, topology: Topology, mesh: Mesh) -> ReadPoints:
    """The rows of a CSV file that belong to this chip.

    Columns: chip, kind (or op), group_size, payload_bytes, seconds (or time_us), and optionally
    payload_meaning, dtype_shape (`f32[64,8]->[256,8]`) and groups (`{0,4},{1,5}`). Rows without groups
    use the mesh axis of that size, else contiguous groups. Incomplete rows are skipped with a reason.
    """
    try:
        text = read_file(path).decode()
        rows = list(csv.DictReader(StringIO(text, newline="")))
    except FileNotFoundError:
        raise ParseError(f"{path}: no such file. Give a CSV file of timed collectives.") from None
    except (OSError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ParseError(
            f"{path}: cannot be read ({reason}). Give a CSV file of timed collectives."
        ) from error
    except UnicodeDecodeError as error:
        raise ParseError(f"{path}: not a text file ({error}). Give a CSV file.") from None
    missing = [name for name in _REQUIRED if rows and name not in rows[0]]
    if not rows or missing:
        raise ParseError(
            f"{path}: {'no rows' if not rows else 'no column ' + ', '.join(missing)}. Give the columns "
            "chip, kind, group_size, payload_bytes and seconds (or time_us)."
        )
    points: list[TimedCollective] = []
    skipped: list[str] = []
    n_of_other_chips = 0
    for number, row in enumerate(rows, start=2):
        try:
            if chip_of(row["chip"] or "").name != topology.chip.name:
                n_of_other_chips += 1
            else:
                points.append(_point(row, topology, mesh))
        except SpecError as reason:
            skipped.append(f"{path}:{number}: {reason}")
    return ReadPoints(
        points=tuple(points), skipped=tuple(skipped), n_of_other_chips=n_of_other_chips
    )


def _point(row: Mapping[str, str | None], topology: Topology, mesh: Mesh) -> TimedCollective:
    cell = {name: (value or "").strip() for name, value in row.items() if name}
    kind = _kind(cell.get("kind") or cell.get("op", ""))
    n = _number(cell["group_size"], "group_size")
    payload_bytes = _payload_bytes(cell, kind, n)
    groups = _groups(cell.get("groups", "") or cell.get("notes", ""))
    return TimedCollective(
        axis=cell.get("axis", ""),
        groups=groups or _groups_of_size(topology, mesh, n),
        kind=kind,
        payload_bytes=payload_bytes,
        seconds=_seconds(cell),
    )


def _payload_bytes(cell: Mapping[str, str], kind: Kind, n: int) -> int:
    """The payload by the nccl-tests rule, converted from the row's `payload_meaning`."""
    payload_bytes = _number(cell["payload_bytes"], "payload_bytes")
    meaning = cell.get("payload_meaning", "")
    if meaning == _PER_DEVICE:
        return payload_bytes * n
    if meaning in _NCCL_PAYLOADS:
        return payload_bytes
    shape = re.fullmatch(r"(\w+)\[[\d,]*\]->\[([\d,]+)\]", cell.get("dtype_shape", ""))
    if shape is None or kind is not Kind.ALL_GATHER:
        raise SpecError(f"payload_meaning '{meaning}' is unknown")
    return array_bytes(dtype_name(shape[1]), tuple(map(int, shape[2].split(","))))


def _seconds(cell: Mapping[str, str]) -> float:
    for name, scale in (("seconds", 1.0), ("time_us", 1e-6)):
        if text := cell.get(name):
            try:
                return float(text) * scale
            except ValueError:
                raise SpecError(f"{name} '{text}' is not a number") from None
    raise SpecError("seconds or time_us is missing")


def _number(text: str, name: str) -> int:
    digits = re.match(r"\d+", text)
    if digits is None or digits[0] != text.rstrip("?"):
        raise SpecError(f"{name} '{text}' is not a number")
    return int(digits[0])


def _kind(text: str) -> Kind:
    words = text.lower().replace("-", "_").split()
    for kind in KINDS:
        if words and words[0] == kind:
            return kind
    if words and words[0] in {"psum", "allreduce"}:
        return Kind.ALL_REDUCE
    raise SpecError(f"kind '{text}' is not one of {', '.join(KINDS)}")


def _groups(text: str) -> Groups:
    """The groups in `{0,4},{1,5},..`; a trailing `..` continues the pattern."""
    written = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text)]
    if len(written) > 1 and ".." in text:
        step = written[1][0] - written[0][0]
        n_groups = written[0][1] - written[0][0] if step == 1 else len(written)
        return tuple(tuple(d + step * i for d in written[0]) for i in range(n_groups))
    return tuple(written)


def _groups_of_size(topology: Topology, mesh: Mesh, n: int) -> Groups:
    for axis in mesh.names:
        if mesh.size(axis) == n:
            return mesh.groups(axis)
    if n < 2 or topology.n_devices % n:
        raise SpecError(
            f"groups of {n} do not divide '{topology.name}' of {topology.n_devices} devices"
        )
    return Mesh(axes=(("dp", topology.n_devices // n), ("tp", n))).groups("tp")
