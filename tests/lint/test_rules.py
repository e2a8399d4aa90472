"""Faults of each kind in small programs, and the correct program next to each, which raises no alarm."""

import pytest
from test_waste import HEAD

from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.lint.findings import lint_module
from meshscope.readers.lint.log import WASTE

MAXIMUM = """
%max (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %m = f32[] maximum(%c, %d)
}
"""
COUNT = """
%next (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %y = f32[8,8]{1,0} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %half = f32[] constant(0.5)
  %halves = f32[8,8]{1,0} broadcast(%half), dimensions={}
  %j = s32[] add(%i, %one)
  %z = f32[8,8]{1,0} multiply(%y, %halves)
  %own = f32[8,8]{1,0} add(%z, %y)
  ROOT %n = (s32[], f32[8,8]) tuple(%j, %own)
}

%more (s: (s32[], f32[8,8])) -> pred[] {
  %s = (s32[], f32[8,8]) parameter(0)
  %k = s32[] get-tuple-element(%s), index=0
  %last = s32[] constant(9)
  ROOT %goes = pred[] compare(%k, %last), direction=LT
}
"""
ARGUMENTS = """
ENTRY %main (x: f32[8,4], w: f32[4,8], e: f32[1,8,8], ids: s32[2]) -> f32[] {
  %x = f32[8,4]{1,0} parameter(0), sharding={devices=[1,4]<=[4]}
  %w = f32[4,8]{1,0} parameter(1), sharding={devices=[4,1]<=[4]}
  %e = f32[1,8,8]{2,1,0} parameter(2), sharding={devices=[4,1,1]<=[4]}
  %ids = s32[2]{0} parameter(3), sharding={devices=[4]<=[4]}
  %table = f32[32,8]{1,0} parameter(4), sharding={replicated}
  %id = u32[] partition-id()
  %two = u32[] constant(2)
  %zero = u32[] constant(0)
  %none = f32[] constant(0)
  %zeros = f32[8,8]{1,0} broadcast(%none), dimensions={}
  %partial = f32[8,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %rows = f32[2,8]{1,0} gather(%table, %ids), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,8}
  %hidden = f32[2,8]{1,0} tanh(%rows)
"""
ALL, HALVES = "replica_groups={{0,1,2,3}}", "replica_groups={{0,1},{2,3}}"
REDUCED = f"  %largest = f32[8]{{0}} reduce(%x, %none), dimensions={{1}}, to_apply=%max\n  ROOT %r = f32[8]{{0}} all-reduce(%largest), {ALL}, to_apply=%max\n"
EXPERT = "  %own = f32[8,8]{1,0} reshape(%e)\n  ROOT %y = f32[2,8]{1,0} dot(%NAME, %own), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
EXCHANGED = f"  %sent = f32[2,8]{{1,0}} all-to-all(%hidden), dimensions={{1}}, {ALL}\n"
ALONE = "  %first = pred[] compare(%id, %zero), direction=EQ\n  %every = pred[8,8]{1,0} broadcast(%first), dimensions={}\n  %own = f32[8,8]{1,0} select(%every, %OF, %zeros)\n"
SUM = f"  %sum = f32[8,8]{{1,0}} all-reduce(%OF), {ALL}, to_apply=%add\n"
SHIFT = "  %there = f32[8,8]{{1,0}} collective-permute(%partial), source_target_pairs={{{pairs}}}\n"
USED = "  ROOT %t = f32[8,8]{1,0} tanh(%NAME)\n"


def kinds(body: str) -> set[str]:
    text = f"{HEAD}{MAXIMUM}{COUNT}{ARGUMENTS}{body}}}\n"
    findings = lint_module(parse_hlo(text, "small"), Mesh(axes=(("tp", 4),))).findings
    return {one.kind.value for one in findings if one.kind not in WASTE}


def of(text: str, name: str) -> str:
    return text.replace("OF", name).replace("NAME", name)


@pytest.mark.parametrize(
    ("correct", "wrong", "kind"),
    [
        (REDUCED, REDUCED.replace(ALL, HALVES), "missing_reduction"),
        (EXCHANGED + of(EXPERT, "sent"), of(EXPERT, "hidden"), "mismatched_parts"),
        (
            of(SUM, "partial") + of(ALONE, "sum") + USED.replace("NAME", "own"),
            of(ALONE, "partial") + of(SUM, "own") + of(USED, "sum"),
            "missing_reduction",
        ),
        (
            SHIFT.format(pairs="{0,1},{1,2},{2,3},{3,0}") + of(SUM, "there") + of(USED, "sum"),
            SHIFT.format(pairs="{0,1}") + of(SUM, "there") + of(USED, "sum"),
            "missing_reduction",
        ),
        (
            f"  ROOT %g = f32[8,16]{{1,0}} all-gather(%x), dimensions={{1}}, {ALL}\n",
            of(SUM, "partial")
            + f"  ROOT %g = f32[32,8]{{1,0}} all-gather(%sum), dimensions={{0}}, {ALL}\n",
            "gather_of_replicated",
        ),
        (
            of(SUM, "partial")
            + "  %c = f32[16,8]{1,0} concatenate(%sum, %zeros), dimensions={0}\n  ROOT %t = f32[16,8]{1,0} tanh(%c)\n",
            of(SUM, "partial")
            + "  %c = f32[16,8]{1,0} concatenate(%sum, %partial), dimensions={0}\n  ROOT %t = f32[16,8]{1,0} tanh(%c)\n",
            "missing_reduction",
        ),
    ],
    ids=["half", "not exchanged", "one device", "lost", "copies", "joined"],
)
def test_a_fault_is_reported_and_the_correct_program_is_not(
    correct: str, wrong: str, kind: str
) -> None:
    assert (kinds(correct), kinds(wrong)) == (set(), {kind})


def test_a_loop_that_scales_what_it_carries_settles() -> None:
    body = (
        of(SUM, "partial")
        + "  %start = s32[] constant(0)\n  %in = (s32[], f32[8,8]) tuple(%start, %PART)\n"
        "  %out = (s32[], f32[8,8]) while(%in), condition=%more, body=%next\n"
        "  ROOT %t = f32[8,8]{1,0} get-tuple-element(%out), index=1\n"
    )
    module = parse_hlo(
        f"{HEAD}{MAXIMUM}{COUNT}{ARGUMENTS}{body}}}\n".replace("%PART", "%sum"), "small"
    )
    assert lint_module(module, Mesh(axes=(("tp", 4),))).unfollowed == ()
    assert kinds(body.replace("%PART", "%partial")) == {"missing_reduction"}
