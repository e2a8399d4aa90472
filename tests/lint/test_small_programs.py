"""Faults and waste of each kind in small programs, and correct programs next to them, which raise no alarm."""

from pathlib import Path

import pytest
from tables import stored, table

from meshscope.errors import ParseError
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.lint.findings import lint_module

PROGRAM = stored(Path(__file__).with_suffix(".yaml"))["texts"]["PROGRAM"]


def said(text: str, mesh: Mesh) -> dict[str, bool | int]:
    """Whether each finding is certain, and how many operations were not followed for each reason."""
    program = lint_module(parse_hlo(text, "small"), mesh)
    return {one.kind: one.is_certain for one in program.findings} | dict(program.unfollowed)


@table
def test_what_is_said_of_a_program(body: list[str], said_of_it: dict[str, bool | int]) -> None:
    *lines, root = "\n".join(body).split("\n")
    text = PROGRAM + "\n".join(f"  {line}" for line in (*lines, f"ROOT {root}")) + "\n}\n"
    assert said(text, Mesh(axes=(("tp", 4),))) == said_of_it


def test_a_permute_may_exchange_two_axes() -> None:
    """Devices 1 and 2 exchange their columns, which axis b splits: then axis a does."""
    text = PROGRAM.replace(
        "(0), sharding={devices=[1,4]<=[4]}",
        "(0), sharding={devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}",
    ) + (
        "  %p = f32[8,4]{1,0} collective-permute(%x), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}\n"
        "  ROOT %g = f32[8,8]{1,0} all-gather(%p), dimensions={1}, replica_groups={GROUPS}\n}\n"
    )
    mesh = Mesh(axes=(("a", 2), ("b", 2)))
    each = [said(text.replace("GROUPS", groups), mesh) for groups in ("{0,2},{1,3}", "{0,1},{2,3}")]
    assert ["missing_gather" in one for one in each] == [False, True]


def test_a_text_that_is_cut_off_is_not_clean() -> None:
    with pytest.raises(ParseError, match="small:62: the text is truncated"):
        parse_hlo(PROGRAM, "small")


def test_a_text_of_one_device_that_was_cut_from_several_is_not_clean() -> None:
    body = "  ROOT %t = f32[8,4]{1,0} tanh(%x)\n}\n"
    text = (PROGRAM + body).replace(", num_partitions=4", "")
    assert "a sharding of another form: {devices=[1,4]<=[4]}" in said(text, Mesh(axes=()))
