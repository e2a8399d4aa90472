"""Event names as TPU, GPU and CPU profilers write them."""

import pytest
from tables import table

from meshscope.events.enums import Kind
from meshscope.plans.mesh import Groups
from meshscope.readers.hlo.groups import groups_without_module
from meshscope.readers.profile.ops import MAX_TEXT, HloLine, read_hlo_line


def test_an_all_reduce_has_its_array_groups_and_bytes() -> None:
    text = (
        "%all-reduce = f32[5,1024,1024,256]{3,2,1,0:T(8,128)} all-reduce(f32[5,1024,1024,256]"
        "{3,2,1,0:T(8,128)} %bitcast), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), "
        "use_global_device_ids=true, to_apply=%region_0.3.clone"
    )
    assert read_hlo_line(text) == HloLine(
        hlo_name="all-reduce",
        opcode="all-reduce",
        kind=Kind.ALL_REDUCE,
        dtype="f32",
        shape=(5, 1024, 1024, 256),
        payload_bytes=5_368_709_120,
        groups=((0, 4), (1, 5), (2, 6), (3, 7)),
    )


@table
def test_payload_follows_the_size_rule(text: str, payload_bytes: int | None) -> None:
    assert read_hlo_line(text).payload_bytes == payload_bytes


def test_a_done_names_the_start_that_it_waits_for() -> None:
    text = "%all-gather-done.7 = f32[8] all-gather-done((f32[4], f32[8]) %all-gather-start.3)"
    assert read_hlo_line(text).starts == "all-gather-start.3"
    for name in ("all-reduce-done.4", "all-reduce-start.4"):
        assert read_hlo_line(name).starts == "all-reduce-start.4"


def test_a_fusion_has_the_kind_in_its_name_and_a_mesh_groups_of_its_module() -> None:
    line = read_hlo_line("%all-reduce-scatter.3 = bf16[2] fusion(bf16[8] %x), kind=kCustom")
    assert (line.opcode, line.kind) == ("fusion", Kind.REDUCE_SCATTER)
    mesh = "replica_groups=mesh['x'=2,'y'=4] {'y'}, u=1"
    assert read_hlo_line(f"%a = f32[4] all-reduce(f32[4] %x), {mesh}").groups is None


def test_longer_lines_are_not_parsed() -> None:
    text = "%a = f32[4] all-reduce(f32[4] %x), metadata={" + " " * MAX_TEXT
    assert read_hlo_line(text) == HloLine(hlo_name="a")
    assert read_hlo_line(text[:MAX_TEXT]).payload_bytes == 16


@table
def test_a_bare_name_identifies_collectives_and_containers(name, opcode, kind: Kind | None) -> None:
    line = read_hlo_line(name)
    assert (line.hlo_name, line.opcode) == (name, opcode)
    assert line.kind == kind


@table
def test_groups_expand_if_the_text_defines_all_devices(text: str, groups: Groups | None) -> None:
    assert groups_without_module(text) == groups


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("%x = (" * 20_000, "x"),
        ("%x = f32[" * 20_000, "x"),
        ("%" * MAX_TEXT, ""),
        ("%x = f32[2] add(" + '\\"' * 90_000, "x"),
        ("%x = /*" + "/* " * 60_000, "x"),
        ("%x = " + "a" * 190_000, "x"),
        ("%x = f32[2] add(%y), " + "replica_groups=mesh[" * 9_000, "x"),
        ("%x = f32[2] add(%y), replica_groups={{0}" + " " * 190_000, "x"),
    ],
    ids=["tuples", "arrays", "percents", "quotes", "comments", "word", "meshes", "spaces"],
)
def test_damaged_lines_of_the_greatest_length_are_read_by_name(text: str, name: str) -> None:
    """Each would take hours by a pattern whose steps grow with the square of the length."""
    assert len(text) <= MAX_TEXT
    assert (read_hlo_line(text).hlo_name, read_hlo_line(text).groups) == (name, None)


@pytest.mark.parametrize("n_left", range(3, 75, 3))
def test_a_line_truncated_anywhere_keeps_its_name(n_left: int) -> None:
    text = "%a.1 = f32[4] all-reduce(f32[4] %x), replica_groups={{0,1},{2,3}}, to_apply=%add"
    line = read_hlo_line(text[:n_left])
    assert line.hlo_name == text[: min(n_left, 4)].lstrip("%")
    assert line.groups in (None, ((0, 1), (2, 3)))
