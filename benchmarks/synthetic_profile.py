"""Writes synthetic XPlane profiles of any size, for TPUs and for the CPU backend.

Field numbers are those of tsl/profiler/protobuf/xplane.proto. Names, stats and sizes of events
imitate profiles that jax.profiler writes. The seed is fixed.
"""

import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from meshscope.reports.export.chakra import number, span

N_KINDS = 3_000  # different ops of one program
N_BETWEEN = 16  # kinds for each kind of collective
N_CPU_DEVICES = 8

Value = int | float | str


def message(*parts: bytes) -> bytes:
    """A message with these fields."""
    return b"".join(parts)


@cache
def known_stat(ident: int, value: int, *, is_ref: bool = False) -> bytes:
    """A cached XStat as a field of its event, for stats that many events share."""
    return span(4, stat(ident, value, is_ref=is_ref))


def stat(ident: int, value: int, *, is_ref: bool = False) -> bytes:
    """An XStat with an integer or a reference to a text."""
    return message(number(1, ident), number(7 if is_ref else 4, value))


def event(kind: int, offset_ps: int, dur_ps: int, stats: Iterable[bytes]) -> bytes:
    """An XEvent as a field of its line; `stats` are encoded fields."""
    times = message(number(1, kind), number(2, offset_ps), number(3, dur_ps))
    return span(4, message(times, *stats))


def names(field: int, entries: dict[int, str]) -> bytes:
    """The map of event metadata (field 4) or of stat metadata (field 5) of a plane."""
    return b"".join(
        span(
            field,
            message(
                number(1, ident),
                span(2, message(number(1, ident), span(2, name))),
            ),
        )
        for ident, name in entries.items()
    )


def tpu_plane(ordinal: int, n_events: int, seed: random.Random) -> bytes:
    """A chip that runs one program; its events have the two stats of TPU op events."""
    kinds = {index: _hlo_line(index) for index in range(1, N_KINDS)}
    kinds[N_KINDS] = "jit_decode(77)"
    events: list[bytes] = []
    first_ps = offset_ps = 10**12
    for _ in range(n_events):
        dur_ps = seed.randrange(10**5, 10**7)
        stats = (span(4, stat(1, offset_ps)), span(4, stat(2, dur_ps)))
        events.append(event(seed.randrange(1, N_KINDS), offset_ps, dur_ps, stats))
        offset_ps += dur_ps
    line = message(number(1, 3), span(2, "XLA Ops"), *events)
    run = event(N_KINDS, first_ps, offset_ps - first_ps, (span(4, stat(3, 1)),))
    modules = message(number(1, 2), span(2, "XLA Modules"), run)
    stat_names = {1: "device_offset_ps", 2: "device_duration_ps", 3: "run_id", 4: "program_id"}
    stat_names |= {5: "hlo_category", 6: "fusion", 7: "all-reduce"}
    parts = span(2, f"/device:TPU:{ordinal}"), span(3, modules), span(3, line)
    return span(1, message(*parts, *map(_kind, kinds.items()), names(5, stat_names)))


def _hlo_line(index: int) -> str:
    """The name of an event; one in sixteen is a collective."""
    shape = "bf16[8,1024,5120]{2,1,0:T(8,128)(2,1)}"
    if index % N_BETWEEN:
        return f"%fusion.{index} = {shape} fusion({shape} %param.{index}), kind=kLoop, calls=%f.{index}"
    return f"%all-reduce.{index} = {shape} all-reduce({shape} %p), replica_groups=[8,4]<=[32]"


def _kind(entry: tuple[int, str]) -> bytes:
    """The metadata of a kind of events, with the stats that all of them share."""
    ident, name = entry
    stats = (stat(4, 77), stat(5, 6 if ident % N_BETWEEN else 7, is_ref=True))
    text = span(2, message(number(1, ident), span(2, name), *(span(5, s) for s in stats)))
    return span(4, message(number(1, ident), text))


def cpu_plane(n_events: int, seed: random.Random) -> bytes:
    """Host threads of the CPU backend; the stats of events name op, module, program, run and device."""
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
        head = message(number(1, device), span(2, f"tf_XLAPjRtCpuClient/{device}"))
        lines.append(span(3, head + message(*events)))
    texts = {**stat_names, 99: "jit_decode", **ops}
    plane = message(span(2, "/host:CPU"), *lines, names(4, ops), names(5, texts))
    return span(1, plane)


def write_profile(path: Path, *, n_events: int, backend: str) -> None:
    """Writes a profile with this many events of four TPU chips, or of eight CPU devices."""
    seed = random.Random(4)
    if backend == "tpu":
        planes = [tpu_plane(ordinal, n_events // 4, seed) for ordinal in range(4)]
    else:
        planes = [cpu_plane(n_events, seed)]
    path.write_bytes(b"".join(planes))
