"""Ops of TPU, GPU and CPU planes, and their containers."""

from pathlib import Path

import pytest
from made_profiles import (
    DONE,
    FUSION,
    GOLDEN,
    REDUCE,
    START,
    WHILE,
    Event,
    Line,
    Plane,
    Ref,
    gpu,
    tpu,
    v6e_host,
    write,
)

from meshscope.readers.profile.ops import EVENTS_SCHEMA, INSTRUCTIONS_SCHEMA, Ops, ops_of
from meshscope.readers.profile.xplane import read_xspace


def read_ops(tmp_path: Path, *planes: Plane) -> Ops:
    return ops_of(read_xspace(write(tmp_path / "a.xplane.pb", *planes)))


def roles(ops: Ops) -> list[tuple[str, str]]:
    return ops.wide().sort("start_s", maintain_order=True).select("hlo_name", "role").rows()


def test_a_tpu_op_has_the_facts_of_its_event_and_metadata(tmp_path: Path) -> None:
    ops = read_ops(tmp_path, tpu(Event(REDUCE, 10, 500)))
    facts = ops.wide().to_dicts()[0]
    assert facts | {"text": ""} == {
        "op": 0, "host": 0, "plane": 0, "line": 1, "device": 3, "core": None, "run_id": 7,
        "start_s": pytest.approx(10e-12), "dur_s": pytest.approx(500e-12), "role": "leaf",
        "module": "jit_decode", "program_id": 12345678901234567890, "hlo_name": "ar.1",
        "opcode": "all-reduce", "kind": "all_reduce", "category": "all-reduce", "starts": None,
        "source_line": "model.py:7", "dtype": "f32", "shape": [4], "payload_bytes": 16,
        "groups": [[0, 1]], "text": "",
    }  # fmt: skip


@pytest.mark.parametrize(("text", "program"), [("12", 12), ("jit_conv", None)])
def test_a_number_that_is_a_text_is_read_or_unknown(tmp_path: Path, text: str, program) -> None:
    event = Event("k", 0, 5, {"hlo_op": Ref("fusion.1"), "program_id": text})
    ops = read_ops(tmp_path, Plane("/device:GPU:0", [Line("Stream #1(Kernel)", [event])]))
    assert ops.wide()["program_id"].to_list() == [program]


def _stream(number: int, name: str, start: int, dur: int) -> Line:
    return Line(f"Stream #{number}", [Event(f"k{number}", start, dur, {"hlo_op": Ref(name)})])


STREAMS = [_stream(1, "all-reduce-start.1", 0, 100), _stream(2, "all-reduce-done.1", 50, 40)]
PAIR = (Event(START, 0, 5), Event(DONE, 50, 40))
ROLES = {
    "a loop": (
        tpu(Event(WHILE, 0, 400), Event(FUSION, 0, 400), Event(REDUCE, 500, 9)),
        [("while.1", "container"), ("fusion.1", "leaf"), ("ar.1", "leaf")],
    ),
    "a loop whose body was lost": (tpu(Event(WHILE, 0, 400)), [("while.1", "container")]),
    "an op that contains another, whatever its name": (
        tpu(Event(FUSION, 0, 400), Event(REDUCE, 5, 9)),
        [("fusion.1", "container"), ("ar.1", "leaf")],
    ),
    "a start that ends before its done": (tpu(*PAIR), [("cs.1", "leaf"), ("cd.1", "leaf")]),
    "a start that lasts beyond its done": (
        Plane("/device:GPU:0", STREAMS),
        [("all-reduce-start.1", "leaf"), ("all-reduce-done.1", "covered")],
    ),
    "a background transfer": (
        tpu(*PAIR, asynchronous=(Event(START, 1, 80),)),
        [("cs.1", "leaf"), ("cs.1", "transfer"), ("cd.1", "leaf")],
    ),
}


@pytest.mark.parametrize("case", ROLES)
def test_ops_have_roles(case: str, tmp_path: Path) -> None:
    plane, expected = ROLES[case]
    assert roles(read_ops(tmp_path, plane)) == expected


def test_sparse_cores_have_their_number(tmp_path: Path) -> None:
    """Events of module and step lines are no ops."""
    planes = (tpu(Event(FUSION, 0, 9)), tpu(Event(FUSION, 0, 5), core=" SparseCore 0"))
    ops = read_ops(tmp_path, *planes)
    assert ops.events.select("device", "core").rows() == [(3, None), (3, 0)]
    assert ops.instructions.height == 1


def test_kernels_of_a_gpu_keep_their_op_and_derived_lines_are_left_out(tmp_path: Path) -> None:
    stats = {"hlo_op": Ref("fusion.3"), "hlo_module": Ref("jit_decode"), "program_id": 5}
    nccl = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)"
    kernels = [Event("loop_fusion", 5, 7, stats), Event(nccl, 20, 7)]
    derived = [Line("XLA Ops", [Event("fusion.3", 5, 7, stats)])]
    derived += [Line("XLA Modules", [Event("jit_decode", 5, 30)])]
    plane = Plane("/device:GPU:1", [Line("Stream #20(Compute)", kernels), *derived])
    rows = read_ops(tmp_path, plane).wide().select("device", "module", "program_id", "kind").rows()
    assert rows == [(1, "jit_decode", 5, None), (1, None, None, "all_gather")]


def test_kernel_launches_are_not_cpu_ops(tmp_path: Path) -> None:
    stats = {"hlo_op": Ref("fusion.3"), "hlo_module": Ref("jit_decode"), "device_ordinal": 2}
    line = Line("t", [Event("fusion.3", 5, 7, stats), Event("cuLaunchKernel", 1, 2, stats)])
    ops = read_ops(tmp_path, Plane("/host:CPU", [line])).wide()
    assert ops.select("hlo_name", "device").rows() == [("fusion.3", 2)]


def test_a_profile_without_ops_has_empty_tables_of_the_schema(tmp_path: Path) -> None:
    ops = read_ops(tmp_path, Plane("/host:CPU", [Line("t", [Event("e", 0, 1)])]))
    assert dict(ops.events.schema) == EVENTS_SCHEMA
    assert dict(ops.instructions.schema) == INSTRUCTIONS_SCHEMA
    assert ops.events.is_empty()


def test_the_recorded_cpu_profile_has_every_op_of_every_device() -> None:
    """4 runs on 8 devices: each run has two iterations of a loop of four ops, and four other ops."""
    ops = ops_of(read_xspace(GOLDEN)).wide()
    psums = ops.filter(ops["hlo_name"] == "psum.7")
    assert psums.group_by("device").len()["len"].to_list() == [8] * 8
    assert ops.filter(ops["role"] == "container")["opcode"].to_list() == ["while"] * 32


def test_every_kernel_of_a_gpu_is_an_op(tmp_path: Path) -> None:
    """Three streams with two kernels each, one of which belongs to an HLO instruction."""
    ops = read_ops(tmp_path, gpu()).wide()
    assert ops["hlo_name"].to_list() == ["copyBuffer.kd", "conv.1"] * 3
    assert ops["kind"].null_count() == 6
    assert ops["line"].to_list() == [0, 0, 1, 1, 2, 2]


def test_kernels_of_a_cuda_graph_are_told_apart_by_their_names() -> None:
    """Prefill and one decode step of Qwen3-8B on an H200, each one graph.

    Layers share kernels: gate and up are 72 products of one kernel, so its name is no instruction.
    """
    ops = ops_of(read_xspace(GOLDEN.with_name("h200.xplane.pb.gz"))).wide()
    decode = ops.filter(ops["module"] == "jit_decode").group_by("hlo_name").len()
    counts = dict(decode.iter_rows())
    assert len(counts) == 30
    assert counts["gemm_fusion_dot_723"] == 72
    assert not any("command_buffer" in name for name in ops["hlo_name"])


def test_a_host_of_a_v6e_slice_has_its_collectives(tmp_path: Path) -> None:
    """5 x 1024 x 1024 x 256 floats are 5,368,709,120 bytes, read once and written once."""
    ops = read_ops(tmp_path, *v6e_host()).wide()
    collectives = ops.filter(ops["kind"].is_not_null())
    assert collectives.group_by("device").len()["len"].to_list() == [3] * 4
    columns = ("kind", "dtype", "shape", "payload_bytes", "groups", "role")
    assert collectives.select(columns).unique().rows() == [
        (
            "all_reduce", "f32", [5, 1024, 1024, 256], 5_368_709_120,
            [[0, 4], [1, 5], [2, 6], [3, 7]], "leaf",
        )
    ]  # fmt: skip
    assert round(collectives["dur_s"].min() * 1e3, 2) == 121.69
    assert round(collectives["dur_s"].max() * 1e3, 2) == 121.72


def test_a_host_offload_is_a_transfer_between_two_leaves(tmp_path: Path) -> None:
    ops = read_ops(tmp_path, *v6e_host()).wide()
    copies = ops.filter((ops["device"] == 0) & ops["opcode"].str.starts_with("copy"))
    counts = copies.group_by("opcode", "role").len().sort("opcode", "role")
    assert sorted(counts.rows()) == [
        ("copy-done", "leaf", 2),
        ("copy-start", "leaf", 2),
        ("copy-start", "transfer", 2),
    ]
