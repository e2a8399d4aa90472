"""A made-up XPlane profile of any size: TPU planes of op events, and host threads of a CPU backend.

Field numbers are those of tsl/profiler/protobuf/xplane.proto; names, stats and sizes of events are
those of profiles that jax.profiler writes. The numbers come from a fixed seed.
"""

import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path

N_KINDS = 3_000  # different ops of one program
N_CPU_DEVICES = 8

Value = int | float | str


def varint(number: int) -> bytes:
    """The number (0..2^64-1) in 7-bit groups, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def number_field(number: int, value: int) -> bytes:
    """A field that is an integer."""
    return varint(number << 3) + varint(value & (2**64 - 1))


def span_field(number: int, content: bytes | str) -> bytes:
    """A field that is a text, bytes or a message."""
    content = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(content)) + content


def message(*parts: bytes) -> bytes:
    """A message of these fields."""
    return b"".join(parts)


@cache
def known_stat(ident: int, value: int, *, is_ref: bool = False) -> bytes:
    """An XStat that many events have, as a field of its event, made once."""
    return span_field(4, stat(ident, value, is_ref=is_ref))


def stat(ident: int, value: int, *, is_ref: bool = False) -> bytes:
    """An XStat: an integer, or a reference to the name of a stat."""
    return message(number_field(1, ident), number_field(7 if is_ref else 4, value))


def event(kind: int, offset_ps: int, dur_ps: int, stats: Iterable[bytes]) -> bytes:
    """An XEvent, as a field of its line; its stats are fields already."""
    times = message(number_field(1, kind), number_field(2, offset_ps), number_field(3, dur_ps))
    return span_field(4, message(times, *stats))


def names(number: int, entries: dict[int, str]) -> bytes:
    """The map of kinds (4) or of names of stats (5) of a plane."""
    return b"".join(
        span_field(
            number,
            message(
                number_field(1, ident),
                span_field(2, message(number_field(1, ident), span_field(2, name))),
            ),
        )
        for ident, name in entries.items()
    )


def tpu_plane(ordinal: int, n_events: int, seed: random.Random) -> bytes:
    """A chip whose events have the two stats that op events of TPUs have."""
    shape = "bf16[8,1024,5120]{2,1,0:T(8,128)(2,1)}"
    kinds = {
        index: f"%fusion.{index} = {shape} fusion({shape} %param.{index}), kind=kLoop, calls=%f.{index}"
        for index in range(1, N_KINDS)
    }
    events: list[bytes] = []
    offset_ps = 10**12
    for _ in range(n_events):
        dur_ps = seed.randrange(10**5, 10**7)
        stats = (span_field(4, stat(1, offset_ps)), span_field(4, stat(2, dur_ps)))
        events.append(event(seed.randrange(1, N_KINDS), offset_ps, dur_ps, stats))
        offset_ps += dur_ps
    line = message(number_field(1, 3), span_field(2, "XLA Ops"), *events)
    stat_names = {1: "device_offset_ps", 2: "device_duration_ps"}
    parts = span_field(2, f"/device:TPU:{ordinal}"), span_field(3, line)
    return span_field(1, message(*parts, names(4, kinds), names(5, stat_names)))


def cpu_plane(n_events: int, seed: random.Random) -> bytes:
    """Threads of a CPU backend, whose op events tell op, module, program, run and device."""
    ops = {index: f"fusion.{index}" for index in range(100, 100 + N_KINDS)}
    stat_names = {1: "hlo_op", 2: "hlo_module", 3: "program_id", 4: "run_id", 5: "device_ordinal"}
    lines: list[bytes] = []
    for device in range(N_CPU_DEVICES):
        events: list[bytes] = []
        offset_ps = 10**9
        for _ in range(n_events // N_CPU_DEVICES):
            dur_ps, op = seed.randrange(10**5, 10**7), seed.randrange(100, 100 + N_KINDS)
            refs = known_stat(1, op, is_ref=True), known_stat(2, 99, is_ref=True)
            facts = known_stat(3, 16), known_stat(4, 168_769_681), known_stat(5, device)
            events.append(event(op, offset_ps, dur_ps, (*refs, *facts)))
            offset_ps += dur_ps
        head = message(number_field(1, device), span_field(2, f"tf_XLAPjRtCpuClient/{device}"))
        lines.append(span_field(3, head + message(*events)))
    texts = {**stat_names, 99: "jit_decode", **ops}
    plane = message(span_field(2, "/host:CPU"), *lines, names(4, ops), names(5, texts))
    return span_field(1, plane)


def write_profile(path: Path, *, n_events: int, backend: str) -> None:
    """A profile with this many events of four TPU chips, or of a CPU backend with eight devices."""
    seed = random.Random(4)
    if backend == "tpu":
        planes = [tpu_plane(ordinal, n_events // 4, seed) for ordinal in range(4)]
    else:
        planes = [cpu_plane(n_events, seed)]
    path.write_bytes(b"".join(planes))
