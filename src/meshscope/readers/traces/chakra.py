"""Reads Chakra execution traces with times: one file for each rank, `NAME.RANK.et`.

Format: MLCommons Chakra, schema/protobuf/et_def.proto (schema 0.0.4): messages with their lengths before them, the
metadata first. `comm_groups.json` next to the file has the ranks of process groups, as ASTRA-sim reads them. Nodes
that run on the host or have no duration are left out.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshscope.errors import TraceError
from meshscope.events.enums import Kind
from meshscope.files import read_json
from meshscope.readers.profile.plane import read_bytes
from meshscope.readers.profile.wire import Message, WireError, read_varint
from meshscope.readers.traces.servers import StepMark
from meshscope.readers.traces.sniff import GROUPS
from meshscope.readers.traces.trace import (
    NS_PER_US,
    Category,
    ColumnParts,
    OpCodes,
    Trace,
    TraceFormat,
    events_table,
    ops_table,
    steps_table,
)

MAX_GROUP_BYTES = 64 << 20
MAX_NAME = 1000  # characters
_AT_ONCE = 10_000
_RANK = re.compile(r"(?:^|[._-])(\d{1,7})\.et(?:\.gz)?$")
_PHASE = re.compile(r"^(prefill|decode)\b")
_MEM_LOAD, _MEM_STORE, _COMPUTE, _SEND, _RECV, _COLLECTIVE = 2, 3, 4, 5, 6, 7
_COPIES = {_MEM_LOAD, _MEM_STORE}
_KINDS = (  # CollectiveCommType of et_def.proto
    *(Kind.ALL_REDUCE, Kind.REDUCE, Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.BROADCAST),
    *(Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER),
)
_NUMBERS, _TEXT, _BOOL = (7, 9, 11, 13), 29, 27  # fields of AttributeProto


class _Op(NamedTuple):
    """What distinguishes the ops of a file."""

    name: str
    type: int
    comm_type: int | None = None
    n_bytes: int | None = None
    group: str | None = None
    pair: tuple[int, int] | None = None


def read_chakra(path: Path) -> Trace:
    """The trace of one rank; TraceError for a damaged file, or one without times."""
    codes, columns = OpCodes(_Op("(other ops)", _COMPUTE)), ColumnParts("op", "start_ns", "dur_ns")
    n_nodes = n_untimed = 0
    batch: list[tuple[_Op, int, int]] = []

    def add() -> None:
        columns.add(
            op=codes.codes(op for op, _, _ in batch),
            start_ns=np.array([start for _, start, _ in batch], np.int64),
            dur_ns=np.array([dur for _, _, dur in batch], np.int64),
        )
        batch.clear()

    try:
        for node in _nodes(path):
            n_nodes += 1
            op, dur_us = _op(node), node.number(7)
            if op is None or dur_us <= 0:
                n_untimed += op is not None
                continue
            batch.append((op, node.number(6) * NS_PER_US, dur_us * NS_PER_US))
            if len(batch) == _AT_ONCE:
                add()
        add()
    except WireError as error:
        raise TraceError(
            f"{path}: damaged or truncated, or no Chakra trace: {error.reason}. Copy the original again."
        ) from error
    taken = columns.taken()
    if not len(taken["op"]):
        raise TraceError(
            f"{path}: none of its {n_nodes:,} nodes has a duration on a device, so it has operators and no times. "
            "Give the trace of the profiler from which it was made."
        )
    rank = _RANK.search(path.name)
    fixed = {"device": 0 if rank is None else int(rank[1]), "stream": 0, "step": -1}
    fixed_columns = {name: np.full(len(taken["op"]), value) for name, value in fixed.items()}
    if phase := _PHASE.search(path.name):
        fixed_columns["step"] = np.zeros(len(taken["op"]), np.int64)
    events, findings = events_table({**taken, **fixed_columns})
    groups = _groups(path.with_name(GROUPS))
    first = int(taken["start_ns"].min())
    last = int((taken["start_ns"] + taken["dur_ns"]).max())
    if n_untimed:
        findings.append(f"{n_untimed:,} nodes of less than 1 us are left out")
    return Trace(
        path=path,
        format=TraceFormat.CHAKRA,
        events=events,
        ops=ops_table(codes.keys, lambda op: _facts(op, groups)),
        steps=steps_table([StepMark(phase[1], first, last - first)] if phase else []),
        n_events=n_nodes,
        contents=f"{n_nodes:,} nodes",
        rank=None if rank is None else int(rank[1]),
        findings=tuple(findings),
    )


def _nodes(path: Path) -> Iterator[Message]:
    """The nodes after the metadata."""
    data = read_bytes(path).data
    position, is_first = 0, True
    while position < len(data):
        length, position = read_varint(data, position)
        if position + length > len(data):
            raise WireError("a message is incomplete", position)
        if not is_first:
            yield Message(data, position, position + length)
        position, is_first = position + length, False


def _op(node: Message) -> _Op | None:
    """The op of a node on a device; None for one that runs on the host or does no work."""
    kind, name = node.number(3), node.text(2)[:MAX_NAME]
    if kind not in {*_COPIES, _COMPUTE, _SEND, _RECV, _COLLECTIVE}:
        return None
    known: dict[str, Any] = {}
    for attribute in node.messages(10):
        field = next((one for one in (*_NUMBERS, _BOOL, _TEXT) if attribute.has(one)), None)
        if field is not None:
            value = attribute.text(field) if field == _TEXT else attribute.number(field)
            known[attribute.text(1)] = value
    if known.get("is_cpu_op") and kind not in {_SEND, _RECV, _COLLECTIVE}:
        return None
    ends = [known[name] for name in ("comm_src", "comm_dst") if isinstance(known.get(name), int)]
    group = known.get("pg_name")
    return _Op(
        name,
        kind,
        comm_type=_whole(known.get("comm_type")),
        n_bytes=_whole(known.get("comm_size")),
        group=None if group is None else str(group)[:MAX_NAME],
        pair=(ends[0], ends[1]) if kind in {_SEND, _RECV} and len(ends) == 2 else None,
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _facts(op: _Op, groups: Mapping[str, list[int]]) -> dict[str, Any]:
    category = Category.COPY if op.type in _COPIES else Category.COMPUTE
    if op.type not in {_SEND, _RECV, _COLLECTIVE}:
        return {"name": op.name, "category": category.value}
    kind = {_SEND: Kind.SEND, _RECV: Kind.RECV}.get(op.type)
    if kind is None and op.comm_type is not None and 0 <= op.comm_type < len(_KINDS):
        kind = _KINDS[op.comm_type]
    ranks = list(op.pair) if op.pair else groups.get(op.group or "")
    n_bytes = op.n_bytes
    if kind is Kind.ALL_GATHER and n_bytes is not None:  # a rank's part, where we count the output
        n_bytes = n_bytes * len(ranks) if ranks else None
    return {
        "name": op.name,
        "category": Category.COLLECTIVE.value,
        "kind": None if kind is None else kind.value,
        "opcode": op.name,
        "group": ranks,
        "group_size": len(ranks) if ranks else None,
        "group_name": op.group,
        "payload_bytes": n_bytes,
    }


def _groups(path: Path) -> dict[str, list[int]]:
    """The ranks of process groups by name; empty without the file."""
    if not path.exists():
        return {}
    try:
        document = read_json(path, MAX_GROUP_BYTES)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"{path}: is no JSON of process groups ({error}). Repair or remove it."
        ) from error
    if not isinstance(document, dict) or not all(
        isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
        for ranks in document.values()
    ):
        raise TraceError(f"{path}: is no object with lists of ranks. Repair or remove it.")
    return document
