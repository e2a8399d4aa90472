"""Names of kernels, of steps, and formats by content."""

import gzip
import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest
from tables import read_rows, stored, table

from meshscope.errors import TraceError
from meshscope.events.enums import Kind
from meshscope.readers.traces.collectives import (
    is_named_like_communication,
    kernel_collective,
    kind_of,
)
from meshscope.readers.traces.servers import (
    StepLabel,
    StepMark,
    distinct_steps,
    kind_of_tokens,
    read_annotation,
)
from meshscope.readers.traces.sniff import check_kind, format_of
from meshscope.readers.traces.trace import TraceFormat

HERE = Path(__file__).parent
TABLES = stored(Path(__file__).with_suffix(".yaml"))


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "group_size"),
    read_rows(HERE / "kernel_names.csv", str, Kind, str, int),
)
def test_kernels_that_communicate(name, kind, dtype, group_size) -> None:
    kernel = kernel_collective(name)
    assert (kernel.kind, kernel.dtype, kernel.group_size) == (kind, dtype, group_size)


@pytest.mark.parametrize(
    ("name", "is_alike"),
    [
        *read_rows(HERE / "kernels_alike.csv", str, bool),
        ("void at::native::reduce_kernel<512, 1>(x)", False),
        ("nvjet_hsh_128x256", False),
    ],
)
def test_kernels_that_compute_may_be_named_like_communication(name: str, *, is_alike: bool) -> None:
    assert kernel_collective(name) is None
    assert is_named_like_communication(name) is is_alike


@table
def test_names_of_collectives(name: str, kind: Kind | None) -> None:
    assert kind_of(name) is kind


@pytest.mark.parametrize(
    ("name", "kind", "prefill_tokens", "decode_tokens"),
    read_rows(HERE / "step_names.csv", str, StepLabel, int, int),
)
def test_annotations_of_steps(name, kind, prefill_tokens, decode_tokens) -> None:
    step = read_annotation(name)
    assert (step.kind, step.prefill_tokens) == (kind, prefill_tokens)
    assert step.decode_tokens == decode_tokens


VLLM = "execute_0_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)"
SGLANG = "step[DECODE bs=32]"


@table
def test_annotations_that_contain_each_other_mark_one_step(
    marks, steps: list[tuple[str, int, int]]
) -> None:
    distinct = distinct_steps([StepMark(*mark) for mark in marks])
    assert [(mark.name, mark.start_ns, mark.dur_ns) for mark in distinct] == steps


@pytest.mark.parametrize("name", ["aten::mm", "execute_model", "nccl:all_reduce", "step"])
def test_other_annotations_are_no_steps(name: str) -> None:
    assert read_annotation(name) is None


def test_thresholds_of_phases() -> None:
    """At least 0.9 of the tokens: prefill; at most 0.2: decode."""
    shares = {(90, 10): "prefill", (89, 11): "mixed", (21, 79): "mixed", (20, 80): "decode"}
    shares[0, 0] = None
    assert {tokens: kind_of_tokens(*tokens) for tokens in shares} == shares


@table
def test_the_content_decides_the_format(tmp_path, content: str, kind: TraceFormat | None) -> None:
    """And such files are of no other kind; a character of the table is a byte."""
    data = content.encode("latin-1")
    (tmp_path / "any.name").write_bytes(data)
    assert format_of(tmp_path / "any.name") is kind
    if not data.startswith(b"\x1f\x8b"):
        check_kind(tmp_path / "any.name")
        (tmp_path / "other").write_bytes(gzip.compress(data))
        assert format_of(tmp_path / "other") is kind


def test_a_trace_with_nodes_is_no_execution_trace(tmp_path: Path) -> None:
    (tmp_path / "any.name").write_bytes(b'{"nodes": 3, "traceEvents": []}')
    check_kind(tmp_path / "any.name")


def tar(name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


EXECUTION = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "start_ts": 1, "nodes": [{"id": 1}]}
OTHERS = {
    "a.tar": (tar("x/host.xplane.pb"), "a tar archive. Unpack it"),
    "b.tar.gz": (gzip.compress(tar("host.xplane.pb")), "a tar archive"),
    "host.xplane.pb": (tar("host.xplane.pb"), "a tar archive"),
    "snapshot.pickle": (pickle.dumps({"segments": []}), "a pickle. Reading it would run its code"),
    "et.json": (
        json.dumps(EXECUTION).encode(),
        "an execution trace of PyTorch .*export_chrome_trace",
    ),
}
OTHERS |= {name: (data.encode("latin-1"), message) for name, data, message in TABLES["others"]}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_kinds_are_named_with_a_remedy(tmp_path: Path, name: str) -> None:
    content, message = OTHERS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=f"{name}: this is .*{message}"):
        check_kind(tmp_path / name)
    assert format_of(tmp_path / name) is None
