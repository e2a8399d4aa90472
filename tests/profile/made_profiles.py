"""XPlane profiles written field by field, and the paths of the recorded ones.

Field numbers are those of tsl/profiler/protobuf/xplane.proto.
"""

import struct
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
GOLDEN = FOLDER / "cpu8.xplane.pb.gz"
TPU_V6E = FOLDER / "tpu_v6e.xplane.pb.gz"
GPU_MI300 = FOLDER / "gpu_mi300.xplane.pb.gz"


class Ref(str):
    """Text stored once per plane, to which stats refer."""

    __slots__ = ()


class Unsigned(int):
    """A number that is written as uint64."""


Value = int | float | str | bytes
Stats = dict[str, Value]


@dataclass(frozen=True)
class Event:
    """An event of a line; times in ps from the line's timestamp."""

    name: str
    start_ps: int
    dur_ps: int
    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    name: str
    events: list[Event] = field(default_factory=list)
    timestamp_ns: int = 0


@dataclass(frozen=True)
class Plane:
    name: str
    lines: list[Line] = field(default_factory=list)
    stats: Stats = field(default_factory=dict)
    kind_stats: dict[str, Stats] = field(default_factory=dict)
    display_names: dict[str, str] = field(default_factory=dict)


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def number(ident: int, value: int) -> bytes:
    return varint(ident << 3) + varint(value)


def span(ident: int, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return varint(ident << 3 | 2) + varint(len(content)) + content


class _Ids:
    """Ids of names, in the order of their first use, from 1 on."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self._next = count(1)

    def __getitem__(self, name: str) -> int:
        if name not in self.of:
            self.of[name] = next(self._next)
        return self.of[name]


def _stat(ident: int, value: Value, names: _Ids) -> bytes:
    head = number(1, ident)
    match value:
        case Ref():
            return head + number(7, names[str(value)])
        case Unsigned():
            return head + number(3, value)
        case float():
            return head + varint(2 << 3 | 1) + struct.pack("<d", value)
        case int():
            return head + number(4, value)
        case str():
            return head + span(5, value)
        case bytes():
            return head + span(6, value)


def _stats(field_number: int, stats: Stats, names: _Ids) -> bytes:
    return b"".join(span(field_number, _stat(names[n], v, names)) for n, v in stats.items())


def _line(ident: int, line: Line, kinds: _Ids, names: _Ids) -> bytes:
    events = b"".join(
        span(
            4,
            number(1, kinds[e.name])
            + number(2, e.start_ps)
            + number(3, e.dur_ps)
            + _stats(4, e.stats, names),
        )
        for e in line.events
    )
    return number(1, ident) + span(2, line.name) + number(3, line.timestamp_ns) + events


def plane_bytes(plane: Plane) -> bytes:
    kinds, names = _Ids(), _Ids()
    lines = [_line(i, line, kinds, names) for i, line in enumerate(plane.lines)]
    metadata = [
        number(1, ident)
        + span(2, name)
        + (span(4, plane.display_names[name]) if name in plane.display_names else b"")
        + _stats(5, plane.kind_stats.get(name, {}), names)
        for name, ident in kinds.of.items()
    ]
    stats = _stats(6, plane.stats, names)
    entries = [span(4, number(1, i) + span(2, m)) for i, m in enumerate(metadata, start=1)]
    texts = [
        span(5, number(1, i) + span(2, number(1, i) + span(2, n))) for n, i in names.of.items()
    ]
    parts = [span(2, plane.name), *(span(3, line) for line in lines), *entries, *texts, stats]
    return b"".join(parts)


def xspace(*planes: Plane, errors: tuple[str, ...] = ()) -> bytes:
    return b"".join([*(span(1, plane_bytes(p)) for p in planes), *(span(2, e) for e in errors)])


def write(path: Path, *planes: Plane, errors: tuple[str, ...] = ()) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(xspace(*planes, errors=errors))
    return path


REDUCE = "%ar.1 = f32[4]{0} all-reduce(f32[4]{0} %x), replica_groups={{0,1}}"
START = "%cs.1 = (f32[4], f32[4]) copy-start(f32[4] %x)"
DONE = "%cd.1 = f32[4] copy-done((f32[4], f32[4]) %cs.1)"
WHILE = "%while.1 = (f32[4]) while((f32[4]) %x), body=%b"
FUSION = "%fusion.1 = f32[4] fusion(f32[4] %x)"


def tpu(*events: Event, asynchronous: tuple[Event, ...] = (), core: str = "") -> Plane:
    """A chip that ran jit_decode, run 7, from 0 to 1,000 ps."""
    return Plane(
        name=f"/device:TPU:3{core}",
        lines=[
            Line(
                "XLA Modules", [Event("jit_decode(12345678901234567890)", 0, 1000, {"run_id": 7})]
            ),
            Line("XLA Ops", list(events)),
            Line("Async XLA Ops", list(asynchronous)),
            Line("Steps", [Event("1", 0, 1000)]),
        ],
        kind_stats={
            name: {
                "program_id": Unsigned(12345678901234567890),
                "hlo_category": Ref(category),
                "tf_op": "jit(f)/decode/mlp/psum:",
                "flops": 11,
                "bytes_accessed": 2**40,
                "source": "model.py:7",
            }
            for name, category in {
                REDUCE: "all-reduce",
                FUSION: "loop fusion",
                WHILE: "while",
                START: "copy-start",
                DONE: "copy-done",
            }.items()
        },
    )
