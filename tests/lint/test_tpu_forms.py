"""Forms of libtpu's text are followed: a sum that no reduction completes is seen through each of them."""

from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from tables import stored

from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.lint.findings import LintedProgram, lint_module

TABLE = stored(Path(__file__).with_suffix(".yaml"))
FORMS: dict[str, Any] = TABLE["forms"]
SUM = (
    "  %whole_sum = f32[8,8]{1,0} all-reduce(%partial), replica_groups={{0,1,2,3}}, to_apply=%add\n"
)


def linted(form: str, end: str, mesh: Mesh | None = None) -> LintedProgram:
    computations, entry = FORMS[form].get("computations", ""), indent(FORMS[form]["entry"], "  ")
    text = f"{TABLE['head']}\n{computations}\n{TABLE['arguments']}{entry}{end}}}\n"
    return lint_module(parse_hlo(text, "small"), mesh)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_followed(form: str) -> None:
    use = "  ROOT %used = f32[8,8]{1,0} tanh(%OF)\n"
    correct, wrong = (
        linted(form, SUM + use.replace("OF", "whole_sum")),
        linted(form, use.replace("OF", "partial")),
    )
    assert (correct.findings, correct.unfollowed) == ((), ())
    assert [one.kind.value for one in wrong.findings] == ["missing_reduction"]


def test_a_program_of_one_slice_does_not_show_what_slices_exchange() -> None:
    mesh = Mesh(axes=(("dp", 2), ("tp", 4)))
    program = linted(
        "a program of one of two slices", SUM + "  ROOT %t = f32[8,8]{1,0} tanh(%whole_sum)\n", mesh
    )
    assert program.findings == ()
    assert program.unfollowed == (("what slices exchange: the program is of one of them", 1),)
