"""Collectives that a program could do without, and paths on which devices do not meet, in small programs."""

from pathlib import Path

import pytest
from tables import stored

from meshscope.errors import ParseError
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.lint.findings import LintedProgram, lint_module
from meshscope.readers.lint.log import WASTE

TEXTS = stored(Path(__file__).with_suffix(".yaml"))["texts"]
HEAD = TEXTS["HEAD"]
ARGUMENTS = TEXTS["ARGUMENTS"]
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


SHIFT = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
RING = f"""  %keys = f32[8,4]{{1,0}} collective-permute(%x), {SHIFT}
  %values = f32[8,4]{{1,0}} collective-permute(%x), {SHIFT}
"""
NEXT = f"  %next = f32[8,4]{{1,0}} collective-permute(%values), {SHIFT}\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "  ROOT %whole = f32[8,16]{1,0} concatenate(%x, %x, %x, %x), dimensions={1}\n",
            {"missing_gather": False},
        ),
        (
            f"  ROOT %rows = f32[32,4]{{1,0}} all-gather(%x), dimensions={{0}}, {ALL}\n",
            {"missing_gather": False},
        ),
        (GATHER.replace("%NAME", "ROOT %whole"), {}),
        (RING + "  ROOT %products = f32[8,4]{1,0} multiply(%keys, %values)\n", {}),
        (
            RING + NEXT + "  ROOT %products = f32[8,4]{1,0} multiply(%keys, %next)\n",
            {"mismatched_parts": False},
        ),
    ],
    ids=["copies of a part", "along another dim", "gathered", "ring", "one permute too many"],
)
def test_parts_that_are_not_gathered_or_do_not_belong_together_are_possible(
    body: str, expected: dict[str, bool]
) -> None:
    of_waste = {one.value for one in WASTE}
    assert {kind: sure for kind, sure in kinds(body).items() if kind not in of_waste} == expected


def test_a_permute_may_exchange_two_axes() -> None:
    """Devices 1 and 2 exchange their columns, which axis b splits: then axis a does."""
    mesh = Mesh(axes=(("a", 2), ("b", 2)))
    text = (
        f"{HEAD}{ARGUMENTS}".replace(
            "devices=[1,4]<=[4]", "devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate"
        )
        + "  %p = f32[8,4]{1,0} collective-permute(%x), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}\n"
        "  ROOT %g = f32[8,8]{1,0} all-gather(%p), dimensions={1}, replica_groups={GROUPS}\n}\n"
    )
    each = [
        {
            one.kind
            for one in lint_module(
                parse_hlo(text.replace("GROUPS", groups), "small"), mesh
            ).findings
        }
        for groups in ("{0,2},{1,3}", "{0,1},{2,3}")
    ]
    assert ["missing_gather" in one for one in each] == [False, True]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            '  ROOT %k = f32[8,4]{1,0} custom-call(%x), custom_call_target="of_a_vendor"\n',
            "the custom call 'of_a_vendor', which is not followed",
        ),
        (
            "  ROOT %s = f32[8,4]{1,0} collective-broadcast(%x), replica_groups={{0,1,2},{3}}\n",
            "groups of devices that are no groups over axes",
        ),
    ],
    ids=["custom call", "groups"],
)
def test_what_is_not_followed_has_its_reason(body: str, reason: str) -> None:
    assert dict(linted(body).unfollowed) == {reason: 1}


def test_a_text_that_is_cut_off_is_not_clean() -> None:
    with pytest.raises(ParseError, match="small:18: the text is truncated"):
        parse_hlo(f"{HEAD}{ARGUMENTS}{SUM}"[:-40], "small")


def test_a_gather_of_a_constant_and_one_that_is_sliced_back_are_waste() -> None:
    ones = "  %one = f32[] constant(1)\n  %ones = f32[8,4]{1,0} broadcast(%one), dimensions={}\n"
    constant = GATHER.replace("%x", "%ones").replace("NAME", "c")
    back = "  %four = u32[] constant(4)\n  %col = u32[] multiply(%id, %four)\n  %b = f32[8,4]{1,0} dynamic-slice(%g, %zero, %col), dynamic_slice_sizes={8,4}\n"
    end = "  ROOT %t = (f32[8,16], f32[8,4]) tuple(%c, %b)\n"
    body = ones + constant + GATHER.replace("NAME", "g") + back + end
    assert kinds(body) == {"constant_collective": False, "sliced_collective": False}
