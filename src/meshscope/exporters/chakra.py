"""A step of each phase as Chakra execution traces: one file a device, nodes in the order of the schedule.

The form is MLCommons Chakra's, schema/protobuf/et_def.proto (schema 0.0.4): a GlobalMetadata message and
then a Node message for each execution, every message after its length as a varint. Attributes are those
that ASTRA-sim's feeder reads: `comm_type`, `comm_size` (bytes that one device puts in: of an all-gather
its part, of the others the array), `comm_src`, `comm_dst`, `comm_tag`, `pg_name`. Process groups are in
`comm_groups.json`, as ASTRA-sim's comm-group configuration has them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.exporters.protobuf import number, span, varint
from meshscope.exporters.run_timeline import Execution, RunTimeline

SCHEMA = "0.0.4"
COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE = 4, 5, 6, 7

# CollectiveCommType of et_def.proto.
COMM_TYPES: dict[Kind, int] = {
    Kind.ALL_REDUCE: 0,
    Kind.ALL_GATHER: 2,
    Kind.GATHER: 3,
    Kind.BROADCAST: 5,
    Kind.ALL_TO_ALL: 6,
    Kind.REDUCE_SCATTER: 7,
}
PAIRS = frozenset({Kind.PERMUTE, Kind.SEND, Kind.RECV})
NS_PER_US = 1000

Groups = dict[tuple[int, ...], str]


def write_chakra(layout: RunTimeline, folder: Path) -> None:
    """Writes `<phase>.<device>.et` for every device, and `comm_groups.json`."""
    if len(layout.devices) < layout.n_devices:
        layout = replace(layout, devices=tuple(range(layout.n_devices)))
    groups = _named_groups(layout)
    for step in layout.steps:
        own = replace(
            layout, executions=tuple(e for e in layout.executions if e.phase == step.phase)
        )
        for device in layout.devices:
            path = folder / f"{step.phase or 'unknown'}.{device}.et"
            with path.open("wb") as out:
                out.write(_framed(_metadata(layout, device)))
                for node in _nodes(own, device, groups):
                    out.write(_framed(node))
    members = {name: list(group) for group, name in groups.items()}
    (folder / "comm_groups.json").write_text(json.dumps(members, indent=1) + "\n")


def _framed(message: bytes) -> bytes:
    return varint(len(message)) + message


def _metadata(layout: RunTimeline, device: int) -> bytes:
    told = {"device": str(device), "title": layout.title, "durations": layout.unit_label}
    attributes = b"".join(span(2, _text(name, value)) for name, value in told.items())
    return span(1, SCHEMA) + attributes


def _named_groups(layout: RunTimeline) -> Groups:
    """Every group of devices that has a collective, numbered from 1 in the order of its first."""
    found: Groups = {}
    for execution in layout.executions:
        if execution.kind is None or execution.kind in PAIRS:
            continue
        for group in execution.groups:
            found.setdefault(group, str(len(found) + 1))
    return found


def _nodes(layout: RunTimeline, device: int, groups: Groups) -> Iterator[bytes]:
    """The nodes of one device; each depends on what ended before it began, as far as that is not implied."""
    open_nodes: dict[int, tuple[int, frozenset[int]]] = {}  # (end, dependencies) of each
    ident = 0
    for execution in layout.of_device(device):
        ended = {n for n, (end_ns, _) in open_nodes.items() if end_ns <= execution.start_ns}
        implied = frozenset[int]().union(*(open_nodes[node][1] for node in ended))
        for node in implied & open_nodes.keys():
            del open_nodes[node]
        before = frozenset(ended - implied)
        end_ns = execution.start_ns + execution.dur_ns
        for attributes, kind in _messages(execution, device, groups):
            ident += 1
            open_nodes[ident] = end_ns, before
            yield _node(layout, execution, ident, kind, before) + attributes


def _node(
    layout: RunTimeline, execution: Execution, ident: int, kind: int, before: Iterable[int]
) -> bytes:
    start_us, dur_us = execution.start_ns // NS_PER_US, round(execution.dur_ns / NS_PER_US)
    deps = b"".join(number(5, node) for node in sorted(before))
    times = number(6, start_us) + number(7, dur_us) if layout.is_time else b""
    return number(1, ident) + span(2, execution.name) + number(3, kind) + deps + times


def _messages(execution: Execution, device: int, groups: Groups) -> Iterator[tuple[bytes, int]]:
    """(attributes, type) of the nodes that an execution is on the device."""
    arguments = execution.arguments
    if execution.kind is None:
        yield _attributes({"is_cpu_op": False}), COMP_NODE
        return
    payload_bytes = arguments.get("payload_bytes")
    if payload_bytes is None:
        raise SpecError(
            f"chakra: the size of '{execution.name}' is not known, and a node needs one. "
            "Export to another form, such as csv."
        )
    if execution.kind in PAIRS:
        yield from _transfers(execution, device, payload_bytes)
        return
    for at in execution.groups_of(device):
        group = execution.groups[at]
        n = len(group)
        size = payload_bytes // n if execution.kind is Kind.ALL_GATHER else payload_bytes
        told = {
            "is_cpu_op": False,
            "comm_type": COMM_TYPES[execution.kind],
            "comm_size": size,
            "pg_name": groups[group],
        }
        yield _attributes(told | _place(arguments)), COMM_COLL_NODE


def _transfers(execution: Execution, device: int, size: int) -> Iterator[tuple[bytes, int]]:
    """A send and a receive of the device's pairs; a tag tells transfers of one pair apart."""
    for at in execution.groups_of(device):
        group = execution.groups[at]
        if len(group) != 2 or group[0] == group[1]:
            continue
        source, target = group
        if execution.kind is Kind.RECV and device == source:
            continue
        if execution.kind is Kind.SEND and device == target:
            continue
        told = {
            "is_cpu_op": False,
            "comm_size": size,
            "comm_src": source,
            "comm_dst": target,
            "comm_tag": at,
        }
        kind = COMM_SEND_NODE if device == source else COMM_RECV_NODE
        yield _attributes(told | _place(execution.arguments)), kind


def _place(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Axis and part, which other readers pass over."""
    return {name: arguments[name] for name in ("axis", "part") if name in arguments}


_INT64 = frozenset({"comm_type", "comm_size"})


def _attributes(values: Mapping[str, Any]) -> bytes:
    return b"".join(span(10, attribute) for attribute in _encoded(values.items()))


def _encoded(values: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    """Fields of AttributeProto: 7 int32, 9 int64, 27 bool, 29 string."""
    for name, value in values:
        if isinstance(value, bool):
            yield span(1, name) + number(27, int(value))
        elif isinstance(value, int):
            yield span(1, name) + number(9 if name in _INT64 else 7, value)
        else:
            yield _text(name, str(value))


def _text(name: str, value: str) -> bytes:
    return span(1, name) + span(29, value)
