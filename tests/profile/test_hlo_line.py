"""What one line of HLO tells by itself, in the forms that profilers of TPUs, GPUs and CPUs write."""

import re
import time

import pytest

from meshscope.events.enums import Kind
from meshscope.readers.profile.hlo_line import HloLine, groups_of, kind_of, read_hlo_line

TILED = "{2,1,0:T(8,128)(2,1)}"


def test_an_all_reduce_tells_array_groups_and_bytes() -> None:
    text = (
        "%all-reduce = f32[5,1024,1024,256]{3,2,1,0:T(8,128)} all-reduce(f32[5,1024,1024,256]"
        "{3,2,1,0:T(8,128)} %bitcast), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), "
        "use_global_device_ids=true, to_apply=%region_0.3.clone"
    )
    assert read_hlo_line(text) == HloLine(
        name="all-reduce",
        opcode="all-reduce",
        dtype="f32",
        shape=(5, 1024, 1024, 256),
        payload_bytes=5_368_709_120,
        groups_text="[4,2]<=[2,4]T(1,0)",
        groups=[[0, 4], [1, 5], [2, 6], [3, 7]],
    )


@pytest.mark.parametrize(
    ("text", "payload_bytes"),
    [
        (f"%g.1 = (bf16[2,8]{TILED}, bf16[8,8]{TILED}) all-gather-start(bf16[2,8] %p)", 128),
        (f"%g.2 = bf16[8,8]{TILED} all-gather-done((bf16[2,8], bf16[8,8]) %g.1)", 128),
        ("%r = f32[2]{0} reduce-scatter(f32[8]{0} %p), dimensions={0}", 32),
        ("%p = (f32[4], f32[4], u32[], u32[]) collective-permute-start(f32[4] %x)", 16),
        ("%a = (f32[4], bf16[2]) all-reduce(f32[4] %x, bf16[2] %y)", 20),
        ("%s = (f32[4], u32[], token[]) send(f32[4] %x, token[] %t)", 16),
        ("%v = (f32[4], u32[], token[]) recv(token[] %t)", 16),
        ("%t = (f32[4], f32[4]) all-to-all(f32[4] %x, f32[4] %y)", 32),
        ("%w = (f32[4], s32[]) while((f32[4], s32[]) %x), body=%b", None),
        ("%d = f32[<=4]{0} all-reduce(f32[<=4]{0} %x)", 16),
    ],
)
def test_payload_follows_the_size_rule(text: str, payload_bytes: int | None) -> None:
    assert read_hlo_line(text).payload_bytes == payload_bytes


def test_a_done_names_the_start_that_it_waits_for() -> None:
    text = "%all-gather-done.7 = f32[8] all-gather-done((f32[4], f32[8]) %all-gather-start.3)"
    assert read_hlo_line(text).starts == "all-gather-start.3"
    assert read_hlo_line("all-reduce-done.4").starts == "all-reduce-start.4"
    assert read_hlo_line("all-reduce-start.4").starts == "all-reduce-start.4"


@pytest.mark.parametrize(
    ("name", "opcode", "kind"),
    [
        ("all-reduce.2", "all-reduce", Kind.ALL_REDUCE),
        ("all-reduce-scatter.3", "all-reduce-scatter", Kind.REDUCE_SCATTER),
        ("collective-permute-start.1.clone", "collective-permute-start", Kind.PERMUTE),
        ("while.12", "while", None),
        ("divide_multiply_fusion.3", None, None),
        ("wrapped_reduce-scatter", None, None),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            None,
            Kind.ALL_REDUCE,
        ),
        ("ncclDevKernel_SendRecv(x)", None, Kind.PERMUTE),
    ],
)
def test_a_name_alone_tells_collectives_and_containers(name: str, opcode: str, kind: Kind) -> None:
    line = read_hlo_line(name)
    assert (line.name, line.opcode) == (name, opcode)
    assert kind_of(line.opcode, name=name) == kind


def test_a_fusion_is_told_by_its_name() -> None:
    line = read_hlo_line("%all-reduce-scatter.3 = bf16[2] fusion(bf16[8] %x), kind=kCustom")
    assert (line.opcode, kind_of(line.opcode, name=line.name)) == ("fusion", Kind.REDUCE_SCATTER)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("{}", None),
        ("mesh['x'=4] {'x'}", None),
        ("[3,2]<=[4]", None),
        ("[2,2]<=[2,2]T(1,7)", None),
        ("[1,99999999]<=[99999999]", None),
    ],
)
def test_groups_are_expanded_or_left_to_others(text: str, groups: list[list[int]] | None) -> None:
    assert groups_of(text) == groups


@pytest.mark.parametrize(
    "text", ["%x = (" * 20_000, "%x = f32[" * 20_000, "%" * 199_999, "(" * 10**6, "a=" * 10**6]
)
def test_a_hostile_line_takes_no_long_time(text: str) -> None:
    started = time.perf_counter()
    read_hlo_line(text)
    assert time.perf_counter() - started < 2


def test_a_mesh_form_is_kept_as_text() -> None:
    line = read_hlo_line(
        "%a = f32[4] all-reduce(f32[4] %x), replica_groups=mesh['x'=2,'y'=4] {'y'}, u=1"
    )
    assert re.fullmatch(r"mesh\['x'=2,'y'=4\] \{'y'\}", line.groups_text or "")
    assert line.groups is None
