"""Execution counts of collectives in loops, layers and branches, with caveats."""

import pytest
from made_hlo import loop_text, module_text, rows_in, while_text

from meshscope.analysis.totals import Unattributed, unattributed
from meshscope.errors import ParseError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.readers.hlo import executions

PARAMETERS = (
    "  %x = f32[8] parameter(0)\n  %flag = pred[] parameter(1)\n  %zero = s32[] constant(0)\n"
)


def _psum(name: str, operand: str, scope: str) -> str:
    return (
        f"  %{name} = f32[8] all-reduce(%{operand}), channel_id=1, replica_groups={{{{0,1}}}}, "
        f'use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(f)/{scope}/psum"}}\n'
    )


def _callee(name: str, *lines: str) -> str:
    return f"\n%{name} (y: f32[8]) -> f32[8] {{\n  %y = f32[8] parameter(0)\n{''.join(lines)}}}\n"


def _rows(computations: str, body: str, **facts: object) -> list[Collective]:
    text = module_text(f"{PARAMETERS}{body}  ROOT %r = f32[8] negate(%x)", computations)
    return rows_in(text, "tp=2", n_steps_of={Phase.DECODE: 9}, **facts)


ATTN = "decode/layers0-3/while/body/attn"
IN_HEAD = _psum("s", "y", "decode/lm_head").replace("  %s =", "  ROOT %s =")
TWICE = _psum("s", "x", "decode/layers0-5/while/body/attn")
TWICE += _psum("s2", "s", "decode/layers0-5/while/body/attn")
INNER = loop_text("i", 5, _psum("s", "x", "decode/layers0-1/while/body/mlp"), "s")
LOOPS = {
    "scanned layers have a row each": (
        *(loop_text("l", 4, _psum("s", "x", "decode/layers3-6/while/body/attn"), "s"), ""),
        [(3, 1), (4, 1), (5, 1), (6, 1)],
    ),
    "nested loops multiply": (
        *(INNER + loop_text("l", 2, while_text("i", "x"), "out"), ""),
        [(0, 5), (1, 5)],
    ),
    "a loop outside layers counts its iterations": (
        *(loop_text("l", 7, _psum("s", "x", "decode/lm_head"), "s"), ""),
        [(None, 7)],
    ),
    "a body unrolled by two runs once per layer": (
        *(loop_text("l", 3, TWICE, "s2"), ""),
        [(layer, 1) for layer in range(6)],
    ),
    "a peeled iteration belongs to the layers of the loop": (
        *(loop_text("l", 3, _psum("s", "x", ATTN), "s"), _psum("first", "x", ATTN)),
        [(layer, 1) for layer in range(4)],
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_loops_count_layers_and_iterations(case: str) -> None:
    loop, before, expected = LOOPS[case]
    rows = _rows(loop, before + while_text("l", "first" if before else "x"))
    assert [(row.layer, row.count) for row in rows] == expected
    assert {(row.n_steps, row.axis_reason) for row in rows} == {(9, None)}


def test_a_mismatch_of_layers_and_iterations_is_a_caveat() -> None:
    rows = _rows(loop_text("l", 5, _psum("s", "x", ATTN), "s"), while_text("l", "x"))
    assert [(row.layer, row.count) for row in rows] == [(None, 5)]
    reason = "the scope says layers 0 to 3, but the operation runs 5 times"
    expected = Unattributed(count=5, payload_bytes=5 * 8 * 4, reasons=((reason, 5),))
    assert unattributed(rows) == expected


def test_a_computation_that_is_called_twice_counts_twice() -> None:
    body = "".join(f"  %c{n} = f32[8] call(%x), to_apply=%callee\n" for n in (1, 2))
    rows = _rows(_callee("callee", IN_HEAD), body)
    assert [(row.hlo_name, row.count) for row in rows] == [("c1", 1), ("c2", 1)]


UNBOUNDED = loop_text("l", 3, _psum("s", "x", "decode/lm_head"), "s").replace(
    "%next = s32[] add(%i, %one)", "%next = s32[] multiply(%i, %one)"
)
BRANCHES = _callee("yes", IN_HEAD) + _callee("no", "  ROOT %same = f32[8] negate(%y)\n")
TAKEN = "  %c = f32[8] conditional(%flag, %x, %x), true_computation=%yes, false_computation=%no\n"


@pytest.mark.parametrize(
    ("computations", "body", "reason"),
    [
        (BRANCHES, TAKEN, "a branch of conditional 'c', counted as taken"),
        (UNBOUNDED, while_text("l", "x"), "the trip count of loop 'while' is unknown"),
    ],
    ids=["branch", "unknown bound"],
)
def test_what_may_run_otherwise_counts_once_with_a_caveat(computations, body, reason) -> None:
    (row,) = _rows(computations, body)
    assert (row.count, reason in row.axis_reason) == (1, True)


def test_a_recursive_computation_is_an_error() -> None:
    again = "  ROOT %again = f32[8] call(%s), to_apply=%callee\n"
    text = _callee("callee", _psum("s", "y", "decode/lm_head"), again)
    with pytest.raises(ParseError, match=r"m\.hlo:\d+: calls nest deeper .*'callee'.*damaged"):
        _rows(text, "  %c = f32[8] call(%x), to_apply=%callee\n")


def test_only_the_first_of_several_entries_runs() -> None:
    first = _callee("first", IN_HEAD).replace("%first", "ENTRY %first")
    (row,) = _rows(first, _psum("second", "x", "decode/lm_head"))
    assert row.hlo_name == "s"


def test_more_collectives_than_the_limit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "MAX_SITES", 1)
    assert len(_rows("", _psum("s", "x", "decode/lm_head"))) == 1
    with pytest.raises(ParseError, match=r"m\.hlo:\d+: more than 1 collectives are reachable from"):
        _rows("", TWICE)


def test_scopes_without_a_phase_take_the_default_phase() -> None:
    body = _psum("s", "x", "layer2/mlp")
    (row,) = _rows("", body, default_phase=Phase.DECODE)
    assert (row.phase, row.layer, row.n_steps, row.axis_reason) == (Phase.DECODE, 2, 9, None)
    (bare,) = _rows("", body)
    reason = "op_name 'jit(f)/layer2/mlp/psum' names no phase"
    assert (bare.phase, bare.axis_reason) == (None, reason)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ("{{0},{1}}", "no device sends to another"),
        ("{{0,1},{0}}", "groups {{0,1},{0}} match no axis of the mesh (tp=2)"),
    ],
)
def test_groups_without_an_axis_are_a_caveat_with_the_mesh(groups: str, reason: str) -> None:
    (row,) = _rows("", _psum("s", "x", "decode/lm_head").replace("{{0,1}}", groups))
    assert (row.axis, row.axis_reason) == (None, reason)
    assert row.wire_bytes == 0 or "match no axis" in reason
