"""Reads Kineto traces: JSON of the PyTorch profiler, as vLLM, SGLang and training frameworks save it.

A file is the trace of one process, which is one rank. A kernel belongs to the step that launched
it: kernel and launch share a correlation id. An NCCL kernel without facts (PyTorch before 2.2) has
those of the `nccl:*` range that launched it: old NCCL names kernels of any collective SendRecv.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.events.intervals import Ints, innermost
from meshscope.hardware.chips import ChipKind
from meshscope.readers.traces import collectives, meanings
from meshscope.readers.traces.json_stream import FAULTS, JsonTrace, Scalar, TraceEvent
from meshscope.readers.traces.servers import StepMark, distinct_steps, read_annotation
from meshscope.readers.traces.trace import (
    MAX_NS,
    MAX_OPS,
    MAX_RANKS,
    Category,
    ColumnParts,
    OpCodes,
    Trace,
    TraceFormat,
    events_table,
    nanoseconds,
    ops_table,
    step_around,
    steps_table,
    whole_numbers,
)
from meshscope.units import counted


class ProcessGroup(NamedTuple):
    """A communicator as the trace lists it; None for what it does not say."""

    description: str | None
    ranks: tuple[int, ...] | None


class KinetoHead(NamedTuple):
    """What a trace says about its process; None if it does not say."""

    rank: int | None
    world_size: int | None
    device_name: str | None
    origin_unix_ns: int | None
    groups: Mapping[str, ProcessGroup]


def _head_of(head: Mapping[str, Any]) -> KinetoHead:
    distributed = _mapping(head.get("distributedInfo"))
    names = (device.get("name") for device in _mappings(head.get("deviceProperties")))
    groups: dict[str, ProcessGroup] = {}
    for group in _mappings(distributed.get("pg_config")):
        name, description = group.get("pg_name"), group.get("pg_desc")
        if isinstance(name, str | int):
            described = description if isinstance(description, str) else None
            groups[str(name)] = ProcessGroup(described, ranks_of(group.get("ranks")))
    return KinetoHead(
        rank=_whole(distributed.get("rank"), MAX_RANKS),
        world_size=_whole(distributed.get("world_size"), MAX_RANKS),
        device_name=next((name for name in names if isinstance(name, str) and name), None),
        origin_unix_ns=_whole(head.get("baseTimeNanoseconds"), MAX_NS),
        groups=groups,
    )


def ranks_of(value: object) -> tuple[int, ...] | None:
    """The ranks in `[0, 1]`, as text or list; None if the list is abridged or is none."""
    if isinstance(value, str):
        if not re.fullmatch(r"\[[\d,\s]*\]", value):
            return None
        value = [int(number) for number in re.findall(r"\d{1,9}", value)]
    if not isinstance(value, list) or not value or len(value) > MAX_RANKS:
        return None
    ranks = tuple(rank for rank in value if isinstance(rank, int) and 0 <= rank < MAX_RANKS)
    return ranks if len(ranks) == len(value) else None


def _mapping(value: object) -> Mapping[str, Any]:
    """The value, or what its JSON says, if that is a mapping."""
    value = _decoded(value) if isinstance(value, str) else value
    return value if isinstance(value, dict) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return list(map(_mapping, value if isinstance(value, list) else ()))


def _decoded(text: str | bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except FAULTS:
        return None


def _whole(value: object, limit: int) -> int | None:
    return value if type(value) is int and 0 <= value < limit else None


COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
OPEN = {"B": 1, "E": -1}


class KinetoArgs(msgspec.Struct, gc=False):
    """The arguments of an event that matter here."""

    stream: Scalar = None
    device: Scalar = None
    correlation: Scalar = None
    collective: str | None = msgspec.field(name="Collective name", default=None)
    n_in: int | None = msgspec.field(name="In msg nelems", default=None)
    n_out: int | None = msgspec.field(name="Out msg nelems", default=None)
    group_size: int | None = msgspec.field(name="Group size", default=None)
    dtype: str | None = None
    group_name: Scalar = msgspec.field(name="Process Group Name", default=None)
    group_text: str | None = msgspec.field(name="Process Group Description", default=None)
    ranks: str | list[int] | None = msgspec.field(name="Process Group Ranks", default=None)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b"null"))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b"null"))


KinetoEvent = TraceEvent[KinetoArgs]


class OpKey(NamedTuple):
    """What distinguishes ops; sizes are None for kernels that carry no facts of a collective."""

    cat: str
    name: str
    collective: str | None = None
    n_in: int | None = None
    n_out: int | None = None
    group_size: int | None = None
    dtype: str | None = None
    group_name: str | None = None
    group_text: str | None = None
    ranks: str | None = None


MAX_RANGES = 1_000_000
MAX_NAME = 1000
MAX_NAMED = 8  # categories in one message
_NUMBER = re.compile(r"\d{1,18}")
_OF_NAME = "the file name says what its steps process: they count as one"
# SGLang's profile_by_stage: 1717-TP-0-EXTEND.trace.json.gz.
_STAGE_IN_NAME = re.compile(r"-(EXTEND|PREFILL|DECODE)(?=[-.])")


def read_kineto(path: Path) -> Trace:
    """The trace of one rank; TraceError if the file is no trace."""
    source, reading = JsonTrace(path, KinetoEvent), _Reading()
    for batch in source:
        reading.add(batch)
    return reading.trace(source)


class _Reading:
    def __init__(self) -> None:
        self.n_events = 0
        self.categories = Counter[str | None]()
        self.n_open = 0  # begins without ends
        self.n_begun = 0  # begins of annotations and ops, which only complete events describe
        self.ops = OpCodes[str | OpKey]("(other kernels)")
        self.events = ColumnParts("op", "device", "stream", "start_ns", "dur_ns", "correlation")
        self.launches = ColumnParts("correlation", "tid", "at_ns")
        self.ranges: list[StepMark] = []  # without a thread on a GPU
        self.calls: list[
            tuple[OpKey, int, int, Scalar]
        ] = []  # collectives: start, duration, thread
        self.n_lost_ranges = 0

    def add(self, batch: Sequence[KinetoEvent]) -> None:
        self.n_events += len(batch)
        self.categories.update(event.cat for event in batch if event.ph == "X")
        uses, ops, launches = meanings("kineto"), list[KinetoEvent](), list[KinetoEvent]()
        for event in batch:  # most events are operators of the host, which are none of these
            use = uses.get(event.cat, "no_ops")
            if event.ph != "X":
                self.n_open += OPEN.get(event.ph, 0)
                self.n_begun += use != "no_ops" and event.ph == "B"
            if use == "no_ops":
                continue
            if use == "launches":
                if event.args is not None:
                    launches.append(event)
            elif use == "ranges":
                self._add_range(event)
            elif event.ph == "X":
                event.cat = use
                ops.append(event)
        if ops:
            self._add_ops(ops)
        if launches:
            self.launches.add(
                correlation=whole_numbers([e.args.correlation for e in launches if e.args]),
                tid=whole_numbers([event.tid for event in launches]),
                at_ns=nanoseconds([event.ts for event in launches]),
            )

    def _add_ops(self, events: list[KinetoEvent]) -> None:
        args = [event.args or _NO_ARGS for event in events]
        pairs = list(zip(events, args, strict=True))
        self.events.add(
            op=self.ops.codes(
                # most kernels have a name alone
                e.name if a.collective is None and a.n_in is None and e.cat == "kernel" and e.name
                and len(e.name) <= MAX_NAME else _key(e, a)
                for e, a in pairs
            ),
            device=whole_numbers([a.device if a.device is not None else e.pid for e, a in pairs]),
            stream=whole_numbers([_stream(e.tid if a.stream is None else a.stream) for e, a in pairs]),
            start_ns=nanoseconds([event.ts for event in events]),
            dur_ns=nanoseconds([event.dur for event in events]),
            correlation=whole_numbers([a.correlation for a in args]),
        )  # fmt: skip

    def _add_range(self, event: KinetoEvent) -> None:
        name = (event.name or "")[:MAX_NAME]
        is_on_gpu = event.cat == "gpu_user_annotation"
        is_call = name.startswith(("nccl:", "rccl:")) and not is_on_gpu
        if event.ph != "X" or not (is_call or read_annotation(name)):
            return
        if len(self.ranges) + len(self.calls) >= MAX_RANGES:
            self.n_lost_ranges += 1
            return
        start_ns, dur_ns = nanoseconds([event.ts, event.dur]).tolist()
        if is_call:
            self.calls.append((_called(name, event.args or _NO_ARGS), start_ns, dur_ns, event.tid))
        else:
            thread = None if is_on_gpu else str(event.tid)
            self.ranges.append(StepMark(name, start_ns, dur_ns, thread))

    def trace(self, source: JsonTrace[KinetoEvent]) -> Trace:
        """The trace after the last batch."""
        head = _head_of(source.head)
        columns = self.events.taken()
        launch_ns, launch_tid = _launches_of(columns["correlation"], self.launches.taken())
        columns["op"], keys = self._with_calls(columns["op"], launch_ns, launch_tid)
        steps, is_on_host = self._steps(has_launches=bool((launch_ns >= 0).any()))
        named = () if len(steps) else _steps_of_name(source.path, columns)
        if named:
            steps, is_on_host = steps_table(named), False
        columns["step"] = step_around(steps, launch_ns if is_on_host else columns["start_ns"])
        events, left = events_table(columns, n_unreadable=source.n_unreadable)
        ops = ops_table(keys, lambda key: _op_facts(key, head))
        rank, n_gpus = head.rank, events["device"].n_unique()
        groups = [set(ranks) for ranks in ops["group"].drop_nulls().to_list()]
        if rank is None and groups and len(shared := set.intersection(*groups)) == 1:
            rank = shared.pop()  # the only one that all its process groups share
        highest = max(rank or 0, *ops["group"].explode().drop_nulls().to_list(), 0)
        if head.world_size is not None and highest >= head.world_size:
            raise TraceError(
                f"{source.path}: rank {highest} is not below the world size {head.world_size}. Give the trace as the "
                "profiler wrote it."
            )
        if n_gpus > 1 and head.world_size == 1:
            rank = None  # one process that uses several GPUs
        if rank is not None:
            events = events.with_columns(pl.lit(rank, pl.Int32).alias("device"))
            steps = steps.with_columns(pl.lit(rank, pl.Int32).alias("device"))
        return Trace(
            path=source.path,
            format=TraceFormat.KINETO,
            events=events,
            ops=ops,
            steps=steps,
            n_events=self.n_events,
            contents=_in_words(self.categories),
            rank=rank,
            world_size=head.world_size,
            device_name=head.device_name,
            chip_kind=ChipKind.TPU if "TPU" in (head.device_name or "") else ChipKind.GPU,
            origin_unix_ns=head.origin_unix_ns,
            findings=(
                *source.findings,
                *left,
                *self._findings(head, rank, n_gpus),
                *([f"no step is annotated; {_OF_NAME}"] if named else []),
            ),
        )

    def _with_calls(
        self, ops: Ints, launch_ns: Ints, launch_tid: Ints
    ) -> tuple[Ints, Sequence[OpKey]]:
        """The op of each event [n], and the ops; NCCL kernels without facts have those of their call."""
        keys = [OpKey("kernel", key) if isinstance(key, str) else key for key in self.ops.keys]
        is_bare = [
            key.cat == "kernel"
            and key.collective is None
            and collectives.kernel_collective(key.name) is not None
            for key in keys
        ]
        bare = np.flatnonzero(np.isin(ops, np.flatnonzero(is_bare)) & (launch_ns >= 0))
        codes = {key: code for code, key in enumerate(keys)}
        for thread in {call[3] for call in self.calls}:
            calls = [call for call in self.calls if call[3] == thread]
            start, dur = (np.array([call[n] for call in calls]) for n in (1, 2))
            launched = bare[launch_tid[bare] == whole_numbers([thread])]
            for event, at in zip(
                launched, innermost(start, start + dur + 1, at=launch_ns[launched]), strict=True
            ):
                if at >= 0:
                    key = calls[at][0]._replace(cat="kernel", name=keys[ops[event]].name)
                    ops[event] = codes.setdefault(key, len(codes))
        return ops, list(codes)

    def _steps(self, *, has_launches: bool) -> tuple[pl.DataFrame, bool]:
        """The steps, and whether they are times of the host, at which kernels are launched."""
        marks = [mark for mark in self.ranges if mark.start_ns >= 0 and mark.dur_ns >= 0]
        on_host = [mark for mark in marks if mark.thread is not None]
        is_on_host = bool(on_host) and (has_launches or len(on_host) == len(marks))
        chosen = on_host if is_on_host else [mark for mark in marks if mark.thread is None]
        return steps_table(distinct_steps(chosen)), is_on_host and has_launches

    def _findings(self, head: KinetoHead, rank: int | None, n_gpus: int) -> Iterator[str]:
        if self.n_begun:
            yield (
                f"{counted(self.n_begun, 'step or op')} recorded as begin and end events, which meshscope does not read"
            )
        if self.n_open > 0:
            yield (
                f"{self.n_open:,} events have a begin without an end: the capture stopped inside of them"
            )
        if self.ops.n_folded:
            yield (
                f"more than {MAX_OPS:,} distinct kernel names: {self.ops.n_folded:,} events share the "
                "name '(other kernels)'"
            )
        if self.n_lost_ranges:
            yield f"{self.n_lost_ranges:,} annotations beyond the first {MAX_RANGES:,} were left out"
        unread = {c: n for c, n in self.categories.items() if c not in meanings("kineto")}
        if unread and n_gpus:  # else the message on the file says so
            yield f"events of categories that meshscope does not read: {_in_words(unread)}"
        if head.rank is None and rank is not None:
            yield f"the trace names no rank; only rank {rank} is in all its process groups"
        if rank is not None and n_gpus > 1:
            yield f"the process ran ops on {n_gpus} GPUs: all of them count as rank {rank}"


def _in_words(categories: Mapping[str | None, int]) -> str:
    """`2 of 'mtia_ccp_events', 1 without a category`, the most frequent first."""
    ordered = sorted(categories.items(), key=lambda item: -item[1])
    words = [f"{n:,} {f'of {cat[:40]!r}' if cat else 'without a category'}" for cat, n in ordered]
    more = [f"{sum(n for _, n in ordered[MAX_NAMED:]):,} of others"] if words[MAX_NAMED:] else []
    return ", ".join([*words[:MAX_NAMED], *more])


def _stream(value: Scalar) -> Scalar:
    """The number of a stream, which old traces write as `stream 7`."""
    number = _NUMBER.search(value) if isinstance(value, str) else None
    return int(number[0]) if number else value


def _key(event: KinetoEvent, args: KinetoArgs) -> OpKey:
    name, cat = (event.name or "")[:MAX_NAME], event.cat or ""
    if args.collective is None and args.n_in is None:
        return OpKey(cat, name)
    facts = (args.collective, args.n_in, args.n_out, args.group_size, args.dtype)
    group_name, ranks = (None if v is None else str(v) for v in (args.group_name, args.ranks))
    return OpKey(cat, name, *facts, group_name, args.group_text, ranks)


def _called(name: str, args: KinetoArgs) -> OpKey:
    """`nccl:all_reduce` with `Input Dims` [[4096, 512]] and `Input type` ["float"]."""
    n_in = dtype = None
    with suppress(*FAULTS):
        shapes = msgspec.json.decode(args.shapes, type=list[list[int]])
        types = msgspec.json.decode(args.types, type=list[str])
        if all(shapes) and len(set(types)) == 1:
            n_in, dtype = sum(map(prod, shapes)), types[0]
    return OpKey("", "", collective=name.partition(":")[2], n_in=n_in, dtype=dtype)


def _launches_of(correlation: Ints, launches: Mapping[str, Ints]) -> tuple[Ints, Ints]:
    """When and by which thread each kernel [n] was launched; -1 if the trace does not say."""
    order = np.argsort(launches["correlation"], kind="stable")
    known = np.append(launches["correlation"][order], -1)
    place = np.searchsorted(known[:-1], correlation)
    is_known = (known[place] == correlation) & (correlation > 0)
    at_ns, tid = (np.append(launches[name][order], -1)[place] for name in ("at_ns", "tid"))
    return np.where(is_known, at_ns, -1).astype(int), np.where(is_known, tid, -1).astype(int)


def _steps_of_name(path: Path, columns: Mapping[str, Ints]) -> Sequence[StepMark]:
    """All ops as one step, if the name of the file says what its steps process."""
    stage, start = _STAGE_IN_NAME.search(path.name), columns["start_ns"]
    if stage is None or not (start >= 0).any():
        return ()
    first = int(start[start >= 0].min())
    last = int((start + columns["dur_ns"]).max())
    return (StepMark(f"step[{stage[1]}]", first, last + 1 - first),)


def _op_facts(key: OpKey, head: KinetoHead) -> dict[str, Any]:
    named = collectives.op_facts(key.name, is_copy=key.cat in COPIES)
    if key.cat in COPIES or (key.collective is None and "kind" not in named):
        return named
    kind = collectives.kind_of(key.collective or "") or named.get("kind")
    group = head.groups.get(key.group_name or "", ProcessGroup(None, None))
    ranks = ranks_of(key.ranks) or group.ranks
    size = key.group_size or (len(ranks) if ranks else None) or named.get("group_size")
    dtype = collectives.dtype_of(key.dtype) or named.get("dtype")
    n_bytes = collectives.payload_bytes(
        kind, n_in=key.n_in, n_out=key.n_out, dtype=dtype, group_size=size
    )
    return {
        "name": named["name"],
        "category": Category.COLLECTIVE.value,
        "kind": kind,
        "opcode": named.get("opcode", collectives.short_name(key.name)),
        "group": None if ranks is None else list(ranks),
        "group_size": size,
        "group_name": key.group_text or group.description,
        "dtype": dtype,
        "payload_bytes": n_bytes,
    }


_NO_ARGS = KinetoArgs()
