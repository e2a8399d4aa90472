"""Chakra traces: what `export --to chakra` writes is read back, and what cannot be used is one message."""

import json
from pathlib import Path

import pytest

from meshscope.errors import TraceError
from meshscope.events.enums import Kind
from meshscope.readers.traces.chakra import read_chakra
from meshscope.readers.traces.sniff import check_kind, format_of, trace_folder
from meshscope.readers.traces.trace import TraceFormat
from meshscope.reports.export.chakra import COMM_TYPES, number, span, varint

GROUPS = {"1": [0, 1, 2, 3]}


def framed(message: bytes) -> bytes:
    return varint(len(message)) + message


def attribute(name: str, value: int | str, field: int = 9) -> bytes:
    content = number(field, value) if isinstance(value, int) else span(29, value)
    return span(10, span(1, name) + content)


def node(kind: int, start_us: int, dur_us: int, name: str = "op", attributes: bytes = b"") -> bytes:
    head = number(1, start_us + 1) + span(2, name) + number(3, kind)
    return framed(head + number(6, start_us) + number(7, dur_us) + attributes)


def collective(kind: Kind, size: int, start_us: int = 0) -> bytes:
    facts = attribute("comm_type", COMM_TYPES[kind]) + attribute("comm_size", size)
    return node(7, start_us, 5, kind.value, facts + attribute("pg_name", "1"))


def written(folder: Path, *nodes: bytes, name: str = "decode.2.et") -> Path:
    (folder / "comm_groups.json").write_text(json.dumps(GROUPS))
    path = folder / name
    path.write_bytes(framed(span(1, "0.0.4")) + b"".join(nodes))
    return path


def test_every_kind_is_read_with_its_group_and_bytes(tmp_path: Path) -> None:
    kinds = list(COMM_TYPES)
    host = node(4, 900, 50, "host", attribute("is_cpu_op", 1, field=27))
    path = written(
        tmp_path,
        *(collective(kind, 1000 + at, 10 * at) for at, kind in enumerate(kinds)),
        node(4, 500, 20, "matmul"),
        node(3, 600, 4, "store"),
        node(5, 700, 3, "send", attribute("comm_size", 64) + attribute("comm_src", 2, 7) + attribute("comm_dst", 3, 7)),
        host,
        node(4, 800, 0, "short"),
    )  # fmt: skip
    trace = read_chakra(path)
    assert (trace.rank, trace.steps["kind"].to_list()) == (2, ["decode"])
    assert trace.events["dur_ns"].to_list() == [5000] * len(kinds) + [20_000, 4000, 3000]
    assert trace.findings == ("1 nodes of less than 1 us are left out",)
    ops = trace.ops.to_dicts()
    for at, (kind, op) in enumerate(zip(kinds, ops, strict=False)):
        # Chakra counts what a rank gives to an all-gather, the event table its output.
        size = (1000 + at) * (4 if kind is Kind.ALL_GATHER else 1)
        assert (op["kind"], op["group"], op["payload_bytes"]) == (kind.value, GROUPS["1"], size)
    assert [op["category"] for op in ops[len(kinds) :]] == ["compute", "copy", "collective"]
    assert ops[-1]["group"] == [2, 3]


def test_a_folder_is_recognized(tmp_path: Path) -> None:
    path = written(tmp_path, node(4, 0, 5))
    assert format_of(path) is TraceFormat.CHAKRA
    assert trace_folder(tmp_path).files == ((path, TraceFormat.CHAKRA),)


@pytest.mark.parametrize("title", ["", "t" * 200])
def test_metadata_may_be_long(tmp_path: Path, title: str) -> None:
    """Exports name the model, slice and plan; with more than 127 bytes of them, the file was taken for HLO."""
    metadata = span(1, "0.0.4") + span(29, title) * bool(title)
    path = tmp_path / "decode.0.et"
    path.write_bytes(framed(metadata) + node(4, 0, 5))
    check_kind(path)
    assert format_of(path) is TraceFormat.CHAKRA


@pytest.mark.parametrize("content", [b"\n\x05hello\x12", b"\x82\xff\xf0", b"HloModule x\n"])
def test_what_is_no_chakra_trace_is_so_called(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.0.et"
    path.write_bytes(content)
    check_kind(path)  # nothing about HLO
    assert format_of(path) is TraceFormat.CHAKRA
    with pytest.raises(TraceError, match="no Chakra trace"):
        read_chakra(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (framed(span(1, "0.0.4")) + node(4, 0, 0), "no times"),
        (framed(span(1, "0.0.4")) + node(4, 0, 5)[:-1], "damaged or truncated"),
        (framed(span(1, "0.0.4")) + varint(1 << 60), "damaged or truncated"),
        (framed(span(1, "0.0.4")) + b"\x80" * 20, "damaged or truncated"),
    ],
)
def test_what_cannot_be_used_is_one_message(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.0.et"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        read_chakra(path)


@pytest.mark.parametrize("groups", ["[1]", '{"1": 3}', "{", '{"1": ["a"]}'])
def test_damaged_groups_are_one_message(tmp_path: Path, groups: str) -> None:
    path = written(tmp_path, node(4, 0, 5))
    (tmp_path / "comm_groups.json").write_text(groups)
    with pytest.raises(TraceError, match="Repair or remove it"):
        read_chakra(path)
