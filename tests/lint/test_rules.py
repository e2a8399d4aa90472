"""Faults of each kind in small programs, and the correct program next to each, which raises no alarm."""

from pathlib import Path

import pytest
from tables import stored
from test_waste import HEAD

from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.lint.findings import lint_module
from meshscope.readers.lint.log import WASTE

TEXTS = stored(Path(__file__).with_suffix(".yaml"))["texts"]
MAXIMUM = TEXTS["MAXIMUM"]
COUNT = TEXTS["COUNT"]
ARGUMENTS = TEXTS["ARGUMENTS"]
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
