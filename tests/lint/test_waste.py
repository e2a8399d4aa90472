"""Collectives that a program could do without, and paths on which devices do not meet, in small programs."""

import pytest

from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.lint.findings import LintedProgram, lint_module

HEAD = """HloModule m, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""
ARGUMENTS = """
ENTRY %main (x: f32[8,4], w: f32[4,8], v: f32[8,8]) -> f32[] {
  %x = f32[8,4]{1,0} parameter(0), sharding={devices=[1,4]<=[4]}
  %w = f32[4,8]{1,0} parameter(1), sharding={devices=[4,1]<=[4]}
  %v = f32[8,8]{1,0} parameter(2), sharding={replicated}
  %id = u32[] partition-id()
  %two = u32[] constant(2)
  %at = u32[] multiply(%id, %two)
  %zero = u32[] constant(0)
"""
ALL = "replica_groups={{0,1,2,3}}"
SUM = f"""  %dot = f32[8,8]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %sum = f32[8,8]{{1,0}} all-reduce(%dot), {ALL}, to_apply=%add
"""
PART = "  {root}%part = f32[2,8]{{1,0}} dynamic-slice(%{of}, %at, %zero), dynamic_slice_sizes={{2,8}}\n"
GATHER = f"  %NAME = f32[8,16]{{1,0}} all-gather(%x), dimensions={{1}}, {ALL}\n"
EXCHANGE = f"  NAME = f32[8,4]{{1,0}} all-to-all(OF), dimensions={{0}}, {ALL}\n"


def linted(body: str, computations: str = "") -> LintedProgram:
    return lint_module(parse_hlo(f"{HEAD}{computations}{ARGUMENTS}{body}}}\n", "small"))


def kinds(body: str, computations: str = "") -> dict[str, bool]:
    return {one.kind: one.is_certain for one in linted(body, computations).findings}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (SUM + PART.format(root="ROOT ", of="sum"), {"sliced_collective": False}),
        (
            SUM
            + PART.format(root="", of="sum")
            + "  ROOT %both = (f32[8,8], f32[2,8]) tuple(%sum, %part)\n",
            {},
        ),
        (
            GATHER.replace("NAME", "one")
            + GATHER.replace("NAME", "two")
            + "  ROOT %more = f32[8,16]{1,0} add(%one, %two)\n",
            {"repeated_collective": False},
        ),
        (
            EXCHANGE.replace("NAME", "%there").replace("OF", "%x")
            + EXCHANGE.replace("NAME", "ROOT %back").replace("OF", "%there"),
            {"returning_reshard": False},
        ),
        (
            SUM
            + "  ROOT %same = f32[8,8]{1,0} dot(%sum, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n",
            {"replicated_work": False},
        ),
    ],
    ids=["reduced, then sliced", "also used whole", "gathered twice", "returns", "alike"],
)
def test_waste_is_named(body: str, expected: dict[str, bool]) -> None:
    assert kinds(body) == expected


BRANCHES = f"""
%meets (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  ROOT %met = f32[8,8]{{1,0}} all-reduce(%p), {ALL}, to_apply=%add
}}

%misses (q: f32[8,8]) -> f32[8,8] {{
  %q = f32[8,8]{{1,0}} parameter(0)
  ROOT %kept = f32[8,8]{{1,0}} negate(%q)
}}
"""


@pytest.mark.parametrize("chooses", ["%id", "%zero"])
def test_devices_that_take_other_paths_miss_a_collective(chooses: str) -> None:
    body = f"""  %dot = f32[8,8]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %first = pred[] compare({chooses}, %zero), direction=EQ
  ROOT %result = f32[8,8]{{1,0}} conditional(%first, %dot, %dot), true_computation=%meets, false_computation=%misses
"""
    expected = {"%id": True, "%zero": None}[chooses]
    assert kinds(body, BRANCHES).get("divergent_collectives") is expected
