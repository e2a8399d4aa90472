"""Writes one step per phase as Chakra execution traces: one file per device, in schedule order.

Format: MLCommons Chakra, schema/protobuf/et_def.proto (schema 0.0.4), with the attributes that the feeder of ASTRA-sim
reads. `comm_groups.json` has the process groups, in the form of ASTRA-sim's comm-group configuration.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.reports.export.timeline import Execution, RunTimeline

SCHEMA = "0.0.4"
COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE = 4, 5, 6, 7

# CollectiveCommType of et_def.proto.
COMM_TYPES: dict[Kind, int] = {
    Kind.ALL_REDUCE: 0,
    Kind.REDUCE: 1,
    Kind.ALL_GATHER: 2,
    Kind.GATHER: 3,
    Kind.SCATTER: 4,
    Kind.BROADCAST: 5,
    Kind.ALL_TO_ALL: 6,
    Kind.REDUCE_SCATTER: 7,
}
PAIRS = frozenset({Kind.PERMUTE, Kind.SEND, Kind.RECV})
NS_PER_US = 1000

VARINT, SPAN = 0, 2  # wire types (https://protobuf.dev/programming-guides/encoding)
EMPTY: Mapping[str, Any] = {}
Groups = dict[tuple[int, ...], str]


def varint(value: int) -> bytes:
    """A non-negative number, seven bits per byte."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def number(field: int, value: int) -> bytes:
    """A varint field; a negative number is written as its 64-bit complement."""
    return varint(field << 3 | VARINT) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def span(field: int, content: bytes | str) -> bytes:
    """A length-delimited field: bytes, text or a message."""
    content = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | SPAN) + varint(len(content)) + content


def write_chakra(run: RunTimeline, folder: Path) -> None:
    """Writes `<phase>.<device>.et` for every device, and `comm_groups.json`."""
    if len(run.devices) < run.n_devices:
        run = replace(run, devices=tuple(range(run.n_devices)))
    groups: Groups = {}  # devices with a collective: numbered from 1 in order of first use
    for execution in run.executions:
        if execution.kind is not None and execution.kind not in PAIRS:
            for group in execution.groups:
                groups.setdefault(group, str(len(groups) + 1))
    for step in run.steps:
        in_phase = replace(
            run, executions=tuple(e for e in run.executions if e.phase == step.phase)
        )
        for device in run.devices:
            path = folder / f"{step.phase or 'unknown'}.{device}.et"
            with path.open("wb") as out:
                out.write(_framed(_metadata(run, device)))
                for node in _nodes(in_phase, device, groups):
                    out.write(_framed(node))
    members = {name: list(group) for group, name in groups.items()}
    (folder / "comm_groups.json").write_text(json.dumps(members, indent=1) + "\n")


def _framed(message: bytes) -> bytes:
    return varint(len(message)) + message


def _metadata(run: RunTimeline, device: int) -> bytes:
    values = {"device": str(device), "title": run.title, "durations": run.unit_label}
    attributes = b"".join(span(2, _text(name, value)) for name, value in values.items())
    return span(1, SCHEMA) + attributes


def _nodes(run: RunTimeline, device: int, groups: Groups) -> Iterator[bytes]:
    """The nodes of one device; each depends on those that ended before it starts, unless it follows from others."""
    open_nodes: dict[int, tuple[int, frozenset[int]]] = {}  # (end, dependencies) of each
    ident = 0
    for execution in run.of_device(device):
        ended = {n for n, (end_ns, _) in open_nodes.items() if end_ns <= execution.start_ns}
        implied = frozenset[int]().union(*(open_nodes[node][1] for node in ended))
        for node in implied & open_nodes.keys():
            del open_nodes[node]
        before = frozenset(ended - implied)
        start_us, dur_us = execution.start_ns // NS_PER_US, round(execution.dur_ns / NS_PER_US)
        times = number(6, start_us) + number(7, dur_us) if run.is_time else b""
        deps = b"".join(number(5, node) for node in sorted(before))
        for attributes, kind in _messages(execution, device, groups):
            ident += 1
            open_nodes[ident] = execution.start_ns + execution.dur_ns, before
            head = number(1, ident) + span(2, execution.name) + number(3, kind)
            yield head + deps + times + attributes


def _messages(execution: Execution, device: int, groups: Groups) -> Iterator[tuple[bytes, int]]:
    """(attributes, type) of the nodes of an execution on the device."""
    arguments = execution.arguments
    if execution.kind is None and not execution.is_received:
        yield _attributes({}, arguments), COMP_NODE
        return
    payload_bytes = arguments.get("payload_bytes")
    if payload_bytes is None:
        raise SpecError(
            f"chakra: the size of '{execution.name}' is not known, but a Chakra node needs it. "
            "Export to another format, such as csv."
        )
    if execution.kind is None or execution.kind in PAIRS:
        yield from _transfers(execution, device, payload_bytes)
        return
    for at in execution.groups_of(device):
        group = execution.groups[at]
        n = len(group) if execution.kind is Kind.ALL_GATHER else 1
        values = {"comm_type": COMM_TYPES[execution.kind], "comm_size": payload_bytes // n}
        yield _attributes(values | {"pg_name": groups[group]}, arguments), COMM_COLL_NODE


def _transfers(execution: Execution, device: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Sends and receives of the pairs that contain the device, with the index of the pair as tag."""
    for at in execution.groups_of(device):
        group = execution.groups[at]
        if len(group) != 2 or group[0] == group[1]:
            continue
        source, target = group
        if (execution.kind, device) in {(Kind.RECV, source), (Kind.SEND, target)}:
            continue
        values = {"comm_size": size, "comm_src": source, "comm_dst": target, "comm_tag": at}
        kind = COMM_SEND_NODE if device == source else COMM_RECV_NODE
        yield _attributes(values, execution.arguments), kind


_PLACES = ("axis", "part", "phase", "layer", "op_class")
_INT64 = frozenset({"comm_type", "comm_size"})


def _attributes(values: Mapping[str, Any], arguments: Mapping[str, Any] = EMPTY) -> bytes:
    """Values, axis, part, phase, layer and class in fields of AttributeProto: 7 int32, 9 int64, 27 bool, 29 string."""
    encoded = [span(1, "is_cpu_op") + number(27, 0)]
    places = {name: arguments[name] for name in _PLACES if name in arguments}
    for name, value in {**values, **places}.items():
        if isinstance(value, int):
            encoded.append(span(1, name) + number(9 if name in _INT64 else 7, value))
        else:
            encoded.append(_text(name, str(value)))
    return b"".join(span(10, attribute) for attribute in encoded)


def _text(name: str, value: str) -> bytes:
    return span(1, name) + span(29, value)
