"""Execution counts of collectives in loops, layers and branches, with caveats."""

from collections.abc import Sequence

import pytest

from meshscope.analysis.totals import Unattributed, unattributed
from meshscope.errors import ParseError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.parse import parse_hlo

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def _psum(name: str, operand: str, scope: str) -> str:
    return (
        f"  %{name} = f32[8] all-reduce(%{operand}), channel_id=1, replica_groups={{{{0,1}}}}, "
        f'use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(f)/{scope}/psum"}}\n'
    )


def _loop(name: str, n: int, body: str, result: str) -> str:
    """Computations of a loop of `n` iterations over (counter, x); `body` makes `result` of `x`."""
    return f"""
%{name}_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %zero = s32[] constant(0)
  %next = s32[] add(%i, %one)
{body}  ROOT %t = (s32[], f32[8]) tuple(%next, %{result})
}}

%{name}_cond (q: (s32[], f32[8])) -> pred[] {{
  %q = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant({n})
  ROOT %less = pred[] compare(%j, %n), direction=LT
}}
"""


def _while(loop: str, operand: str, suffix: str = "") -> str:
    return (
        f"  %init{suffix} = (s32[], f32[8]) tuple(%zero, %{operand})\n"
        f"  %while{suffix} = (s32[], f32[8]) while(%init{suffix}), "
        f"condition=%{loop}_cond, body=%{loop}_body\n"
        f"  %out{suffix} = f32[8] get-tuple-element(%while{suffix}), index=1\n"
    )


def _rows(computations: str, body: str, *, default_phase: Phase | None = None) -> list[Collective]:
    text = (
        f"HloModule m, num_partitions=2\n{ADD}{computations}\n"
        "ENTRY %main (x: f32[8], flag: pred[]) -> f32[8] {\n"
        "  %x = f32[8] parameter(0)\n  %flag = pred[] parameter(1)\n  %zero = s32[] constant(0)\n"
        f"{body}  ROOT %r = f32[8] negate(%x)\n}}\n"
    )
    return collectives_of(
        parse_hlo(text, "m.hlo"),
        mesh=Mesh(axes=(("tp", 2),)),
        n_steps_of={Phase.DECODE: 9},
        crosses_slices=lambda _: None,
        default_phase=default_phase,
    )


def _layers_and_counts(rows: Sequence[Collective]) -> list[tuple[int | None, int]]:
    return [(row.layer, row.count) for row in rows]


def test_scanned_layers_have_a_row_each() -> None:
    loop = _loop("l", 4, _psum("s", "x", "decode/layers3-6/while/body/attn"), "s")

    rows = _rows(loop, _while("l", "x"))

    assert _layers_and_counts(rows) == [(3, 1), (4, 1), (5, 1), (6, 1)]
    assert {(row.n_steps, row.axis_reason) for row in rows} == {(9, None)}


def test_nested_loops_multiply() -> None:
    inner = _loop("inner", 5, _psum("s", "x", "decode/layers0-1/while/body/mlp"), "s")
    outer = _loop("outer", 2, _while("inner", "x"), "out")

    assert _layers_and_counts(_rows(inner + outer, _while("outer", "x"))) == [(0, 5), (1, 5)]


def test_a_loop_outside_layers_counts_its_iterations() -> None:
    loop = _loop("l", 7, _psum("s", "x", "decode/lm_head"), "s")

    assert _layers_and_counts(_rows(loop, _while("l", "x"))) == [(None, 7)]


def test_a_body_unrolled_by_two_runs_once_per_layer() -> None:
    scope = "decode/layers0-5/while/body/attn"
    loop = _loop("l", 3, _psum("s", "x", scope) + _psum("s2", "s", scope), "s2")

    rows = _rows(loop, _while("l", "x"))

    assert _layers_and_counts(rows) == [(layer, 1) for layer in range(6)]


def test_a_peeled_iteration_belongs_to_the_layers_of_the_loop() -> None:
    scope = "decode/layers0-3/while/body/attn"
    loop = _loop("l", 3, _psum("s", "x", scope), "s")

    rows = _rows(loop, _psum("first", "x", scope) + _while("l", "first"))

    assert _layers_and_counts(rows) == [(layer, 1) for layer in range(4)]


def test_a_mismatch_of_layers_and_iterations_is_a_caveat() -> None:
    loop = _loop("l", 5, _psum("s", "x", "decode/layers0-3/while/body/attn"), "s")

    rows = _rows(loop, _while("l", "x"))

    assert _layers_and_counts(rows) == [(None, 5)]
    reason = "the scope says layers 0 to 3, but the operation runs 5 times"
    assert unattributed(rows) == Unattributed(
        count=5, payload_bytes=5 * 8 * 4, reasons=((reason, 5),)
    )


def test_a_computation_that_is_called_twice_counts_twice() -> None:
    called = (
        "\n%callee (y: f32[8]) -> f32[8] {\n  %y = f32[8] parameter(0)\n"
        + _psum("s", "y", "decode/lm_head").replace("  %s =", "  ROOT %s =")
        + "}\n"
    )
    body = "  %c1 = f32[8] call(%x), to_apply=%callee\n  %c2 = f32[8] call(%c1), to_apply=%callee\n"

    assert [(row.hlo_name, row.count) for row in _rows(called, body)] == [("c1", 1), ("c2", 1)]


def test_a_branch_counts_as_taken_with_a_caveat() -> None:
    branches = "".join(
        f"\n%branch{n} (y: f32[8]) -> f32[8] {{\n  %y = f32[8] parameter(0)\n"
        + (_psum("s", "y", "decode/lm_head").replace("  %s =", "  ROOT %s =") if n else "")
        + ("" if n else "  ROOT %same = f32[8] negate(%y)\n")
        + "}\n"
        for n in range(2)
    )
    body = (
        "  %c = f32[8] conditional(%flag, %x, %x), true_computation=%branch1, "
        "false_computation=%branch0\n"
    )

    (row,) = _rows(branches, body)

    assert row.count == 1
    assert row.axis_reason == "a branch of conditional 'c', counted as taken"


def test_a_loop_with_an_unknown_bound_counts_once_with_a_caveat() -> None:
    loop = _loop("l", 3, _psum("s", "x", "decode/lm_head"), "s")
    loop = loop.replace("%next = s32[] add(%i, %one)", "%next = s32[] multiply(%i, %one)")

    (row,) = _rows(loop, _while("l", "x"))

    assert row.count == 1
    assert "the trip count of loop 'while' is unknown" in str(row.axis_reason)


def test_a_recursive_computation_is_an_error() -> None:
    text = (
        "\n%callee (y: f32[8]) -> f32[8] {\n  %y = f32[8] parameter(0)\n"
        + _psum("s", "y", "decode/lm_head")
        + "  ROOT %again = f32[8] call(%s), to_apply=%callee\n}\n"
    )

    with pytest.raises(ParseError, match=r"m\.hlo:\d+: calls nest deeper .*'callee'.*damaged"):
        _rows(text, "  %c = f32[8] call(%x), to_apply=%callee\n")


def test_scopes_without_a_phase_take_the_default_phase() -> None:
    body = _psum("s", "x", "layer2/mlp")

    (row,) = _rows("", body, default_phase=Phase.DECODE)
    (bare,) = _rows("", body)

    assert (row.phase, row.layer, row.n_steps, row.axis_reason) == (Phase.DECODE, 2, 9, None)
    assert bare.phase is None
    assert bare.axis_reason == "op_name 'jit(f)/layer2/mlp/psum' names no phase"


def test_groups_without_an_axis_are_a_caveat_with_the_mesh() -> None:
    text = _psum("s", "x", "decode/lm_head")
    single, partial = text.replace("{{0,1}}", "{{0},{1}}"), text.replace("{{0,1}}", "{{0,1},{0}}")

    (row,) = _rows("", single)
    (other,) = _rows("", partial)

    assert (row.axis, row.axis_reason) == (None, "no device sends to another")
    assert row.wire_bytes == 0
    assert other.axis is None
    assert other.axis_reason == "groups {{0,1},{0}} match no axis of the mesh (tp=2)"
