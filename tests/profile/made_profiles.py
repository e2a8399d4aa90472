"""XPlane profiles written field by field, and the path of the recorded one.

Field numbers are those of tsl/profiler/protobuf/xplane.proto.
"""

import struct
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from meshscope.reports.export.chakra import number, span

FOLDER = Path(__file__).parent / "golden"
GOLDEN = FOLDER / "cpu8.xplane.pb.gz"


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
            return head + bytes([2 << 3 | 1]) + struct.pack("<d", value)
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
        number(1, ident) + span(2, name) + _stats(5, plane.kind_stats.get(name, {}), names)
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


BUFFER = "f32[5,1024,1024,256]{3,2,1,0:T(8,128)}"  # 5,368,709,120 bytes
HOST_BUFFER = "f32[5,1024,1024,256]{3,2,1,0:T(8,128)S(5)}"
SLICE_REDUCE = (
    f"%all-reduce = {BUFFER} all-reduce({BUFFER} %x), channel_id=1, "
    "replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, to_apply=%add"
)
OFFLOAD = f"%copy-start.1 = ({HOST_BUFFER}, {BUFFER}, u32[]) copy-start({BUFFER} %y)"
OFFLOADED = (
    f"%copy-done.1 = {HOST_BUFFER} copy-done(({HOST_BUFFER}, {BUFFER}, u32[]) %copy-start.1)"
)
MS = 10**9  # ps
REDUCE_PS = (121_690_000_000, 121_700_000_000, 121_720_000_000)


def v6e_host() -> tuple[Plane, ...]:
    """One host (4 chips) of a v6e slice of 8 chips: 3 all-reduces and 2 host offloads per chip.

    The lines, stats, shapes, groups and durations are those of a public profile:
    openxla/xprof@01d85deb6a7a, xprof/convert/test_xplanes/tpu_inference_2.xplane.pb.
    """
    return tuple(_v6e_chip(ordinal) for ordinal in range(4))


def _v6e_chip(ordinal: int) -> Plane:
    reduces = [Event(SLICE_REDUCE, 200 * n * MS, dur) for n, dur in enumerate(REDUCE_PS)]
    starts = [Event(OFFLOAD, at * MS, MS) for at in (600, 700)]
    ends = [Event(OFFLOADED, at * MS, 40 * MS) for at in (650, 750)]
    runs = [
        *(
            Event("jit__psum(21)", e.start_ps, e.dur_ps, {"run_id": n})
            for n, e in enumerate(reduces)
        ),
        *(Event("jit_offload(22)", e.start_ps, 90 * MS, {"run_id": 3}) for e in starts),
    ]
    n_bytes = 5 * 1024 * 1024 * 256 * 4
    return Plane(
        name=f"/device:TPU:{ordinal}",
        lines=[
            Line("XLA Modules", runs, timestamp_ns=1_000),
            Line("XLA Ops", sorted([*reduces, *starts, *ends], key=lambda e: e.start_ps), 1_000),
            Line("Async XLA Ops", [Event(OFFLOAD, e.start_ps, 90 * MS) for e in starts], 1_000),
            Line("Overlay", [], 1_000),
            Line("XLA TraceMe", [Event("barrier-cores", e.start_ps, MS) for e in reduces], 1_000),
        ],
        stats={
            "device_type_string": "TPU v6 Lite",
            "peak_teraflops_per_second": 918.0,
            "peak_hbm_bw_gigabytes_per_second": 1637.993152512,
        },
        kind_stats={
            SLICE_REDUCE: _kind_stats("all-reduce", 21, 2 * n_bytes),
            OFFLOAD: _kind_stats("copy-start", 22, n_bytes),
            OFFLOADED: _kind_stats("copy-done", 22, 0),
        },
    )


def _kind_stats(category: str, program: int, bytes_accessed: int) -> Stats:
    return {
        "program_id": Unsigned(program),
        "hlo_category": Ref(category),
        "bytes_accessed": bytes_accessed,
    }


def gpu() -> Plane:
    """A GPU with three streams of kernels and no collectives, as JAX records it on ROCm.

    The lines and stats are those of a public profile: AMD-AGI/TraceLens@171dd74721ca,
    mi300_jax_conv.xplane.pb.
    """
    details = {"kernel_details": " grid:16,1,1 block:512,1,1 private_mem:0"}
    op = {"hlo_op": Ref("conv.1"), "hlo_module": Ref("jit_conv"), "program_id": 3}
    return Plane(
        name="/device:GPU:0",
        lines=[
            Line(
                f"Stream #{stream}(Kernel)",
                [
                    Event("copyBuffer.kd", stream * 1_000, 500, {"correlation_id": 1, **details}),
                    Event(
                        "igemm_fwd.kd", stream * 2_000, 900, {"correlation_id": 2, **op, **details}
                    ),
                ],
                timestamp_ns=2_000,
            )
            for stream in (15, 16, 17)
        ],
        stats={"core_count": 304, "device_vendor": Ref("AMD"), "memory_size": 206141652992},
    )
