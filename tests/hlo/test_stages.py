"""Pipeline programs: the rows of each stage and their execution counts."""

import pytest
from made_hlo import module_text, rows_in

from meshscope.events.collective import Collective, Groups
from meshscope.events.enums import Kind, Part, Phase

STAGE_0, STAGE_1, PAIRS = ((0, 1),), ((2, 3),), ((0, 2), (1, 3))
ComparedRow = tuple[int | None, int | None, Part | None, Kind, Groups, int]


def _psum(name: str, operand: str, scope: str, groups: str = "{{0,1},{2,3}}") -> str:
    return (
        f"  %{name} = f32[8] all-reduce(%{operand}), channel_id=1, replica_groups={groups}, "
        "use_global_device_ids=true, to_apply=%add, "
        f'metadata={{op_name="jit(f)/decode/{scope}/psum"}}\n'
    )


def _branch(name: str, other: str = "busy", operand: str = "x") -> str:
    operands = f"%which, %{operand}, %{operand}"
    return f"  %{name} = f32[8] conditional({operands}), branch_computations={{%idle, %{other}}}\n"


def _tick(x: str, out: str, suffix: str = "") -> str:
    """A tick: a busy stage takes its branch, then all stages send."""
    return _branch(f"y{suffix}", operand=x) + (
        f"  %{out} = f32[8] collective-permute(%y{suffix}), channel_id=1, "
        "source_target_pairs={{0,2},{1,3}}, "
        'metadata={op_name="jit(f)/decode/while/body/stage0/stage/ppermute"}\n'
    )


BRANCHES = """
%idle (i: f32[8]) -> f32[8] {{
  ROOT %i = f32[8] parameter(0)
}}

%busy (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
{busy}  ROOT %busy_out = f32[8] negate(%x)
}}
"""
PARAMETERS = "  %x = f32[8] parameter(0)\n  %which = s32[] parameter(1)\n"


def _rows(busy: str, entry: str, more: str = "") -> list[Collective]:
    """Rows of a program whose busy stages run these lines, with further computations."""
    text = module_text(
        f"{PARAMETERS}{entry}  ROOT %r = f32[8] negate(%x)",
        BRANCHES.format(busy=busy) + more,
        header=", num_partitions=4",
    )
    return rows_in(text, "pp=2,tp=2", n_steps_of={Phase.DECODE: 9})


def _loop(n: int) -> str:
    state = "(s32[], f32[8], s32[])"
    return f"""
%ticks (p: {state}) -> {state} {{
  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %carried = f32[8] get-tuple-element(%p), index=1
  %which = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
{_tick("carried", "received")}  ROOT %t = {state} tuple(%next, %received, %which)
}}

%more (q: {state}) -> pred[] {{
  %q = {state} parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant({n})
  ROOT %less = pred[] compare(%j, %n), direction=LT
}}
"""


WHILE = """  %zero = s32[] constant(0)
  %init = (s32[], f32[8], s32[]) tuple(%zero, %x, %which)
  %while = (s32[], f32[8], s32[]) while(%init), condition=%more, body=%ticks
"""


def _compared(rows: list[Collective]) -> list[ComparedRow]:
    return [(r.stage, r.layer, r.part, r.kind, r.groups, r.count) for r in rows]


IN_STAGES = "while/body/cond/branch_1_fun/stages0-1by2/microbatches2of3"
BUSY = "".join(_psum(f"l{i}", "x", f"{IN_STAGES}/layer{i}/mlp") for i in range(2))
SCANNED = _psum("l0", "x", f"{IN_STAGES}/layers0-1/mlp")
SCANNED += _psum("l1", "l0", f"{IN_STAGES}/layers0-1/mlp")
UNROLLED = _tick("x", "a", "0") + _tick("a", "b", "1") + _tick("b", "c", "2")
LAYERS: list[ComparedRow] = [
    (stage, layer + 2 * stage, Part.MLP, Kind.ALL_REDUCE, groups, 2)
    for layer in (0, 1)
    for stage, groups in enumerate((STAGE_0, STAGE_1))
]


@pytest.mark.parametrize(
    ("busy", "entry", "loop"),
    [
        (BUSY, WHILE, _loop(3)),
        (BUSY, UNROLLED, ""),
        (BUSY, _tick("x", "a", "0") + WHILE, _loop(2)),
        (SCANNED, WHILE, _loop(3)),
    ],
    ids=["a loop of ticks", "unrolled ticks", "a peeled tick", "scanned layers"],
)
def test_layers_shared_by_stages_have_a_row_per_stage_and_count_microbatches(
    busy, entry, loop
) -> None:
    """Three ticks, two microbatches; the sender sends in every tick."""
    rows = _rows(busy, entry, loop)
    in_layers = [row for row in _compared(rows) if row[2] is Part.MLP]
    assert sorted(in_layers, key=str) == sorted(LAYERS, key=str)
    sends = [row for row in rows if row.part is Part.STAGE]
    assert {(r.stage, r.layer, r.kind, r.groups) for r in sends} == {(0, None, Kind.PERMUTE, PAIRS)}
    assert sum(row.count for row in sends) == 3
    assert {(row.axis, row.axis_reason) for row in rows} == {("tp", None), ("pp", None)}


def test_the_branch_of_a_stage_has_no_caveat_but_one_within_it_has() -> None:
    head = _psum("h", "x", "stage1/cond/branch_1_fun/lm_head")
    between = f"""
%between (z: f32[8], which: s32[]) -> f32[8] {{
{PARAMETERS}{_branch("w")}  ROOT %out = f32[8] negate(%w)
}}
"""
    (row,) = _rows(head, _branch("w"))
    assert (row.stage, row.groups, row.axis_reason) == (1, STAGE_1, None)
    (row,) = _rows(head, _branch("v", "between"), between)
    assert row.axis_reason == "a branch of conditional 'w', counted as taken"


def test_a_branch_outside_stages_has_a_caveat() -> None:
    row = _rows(_psum("h", "x", "layer0/mlp"), _tick("x", "a"))[0]
    assert (row.stage, row.axis_reason) == (None, "a branch of conditional 'y', counted as taken")


@pytest.mark.parametrize(
    ("scope", "groups", "axis", "expected"),
    [
        ("sample", "{{0,2},{1,3}}", "pp", PAIRS),
        ("stage7/lm_head", "{{0,1},{2,3}}", "tp", ((0, 1), (2, 3))),  # not in the mesh
    ],
)
def test_operations_of_all_stages_or_one_outside_the_mesh_have_no_stage(
    scope, groups, axis, expected
) -> None:
    (row,) = _rows("", _psum("s", "x", scope, groups))
    assert (row.stage, row.axis, row.groups) == (None, axis, expected)


@pytest.mark.parametrize("n", [2, 4])
def test_a_loop_that_disagrees_with_its_scope_has_a_caveat(n: int) -> None:
    rows = _rows(_psum("l", "x", f"{IN_STAGES}/layers0-1/mlp"), WHILE, _loop(n))
    reasons = {row.axis_reason for row in rows if row.part is Part.MLP and row.stage == 0}
    says = "the scope says layers 0 to 1 and 3 ticks of a pipeline"
    assert reasons == {f"{says}, but the operation runs {n} times"}


SENT = (
    'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="p_0",'
    "_xla_megascale_target={{100000->200000},{100001->200001}},"
    '_xla_megascale_transfer_type="ONE_TO_ONE"}'
)


def test_a_stage_send_across_slices_has_no_op_name() -> None:
    """libtpu gives sends no op_name, and the initial value of the loop has no user."""
    entry = f"""\
  %x = f32[8] parameter(0)
  %y = f32[8] negate(%x), metadata={{op_name="jit(f)/decode/broadcast_in_dim"}}
  %begin = token[] after-all()
  %send = (f32[8], u32[], token[]) send(%y, %begin), channel_id=2, {SENT}
  %recv = (f32[8], u32[], token[]) recv(%begin), channel_id=1, {SENT}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %done = (f32[8], token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %z = f32[8] get-tuple-element(%done), index=0
  ROOT %r = f32[8] negate(%z)
"""
    (row,) = rows_in(
        module_text(entry),
        "pp=2,tp=2",
        n_steps_of={Phase.DECODE: 9},
        crosses_slices=lambda groups: any(group[0] // 2 != group[-1] // 2 for group in groups),
    )
    assert _compared([row]) == [(0, None, Part.STAGE, Kind.PERMUTE, PAIRS, 1)]
    assert (row.axis, row.axis_reason, row.crosses_slices) == ("pp", None, True)


TAKEN = {
    "a slice": "  %w = f32[1,8] slice(%stack), slice={[1:2], [0:8]}\n",
    "a stack of one": "  %w = f32[1,8] parameter(2)\n",
    "a slice fetched ahead": """  %cut = f32[1,8] slice(%stack), slice={[1:2], [0:8]}
  %s0 = ((f32[1,8]), f32[1,4], s32[]) slice-start(%cut), slice={[0:1], [0:4]}
  %s1 = ((f32[1,8]), f32[1,4], s32[]) slice-start(%cut), slice={[0:1], [4:8]}
  %d0 = f32[1,4] slice-done(%s0)
  %d1 = f32[1,4] slice-done(%s1)
  %w = f32[1,8] custom-call(%d0, %d1), custom_call_target="ConcatBitcast"
""",
    "an activation of one sequence": "  %w = f32[1,8] negate(%one)\n",
}


@pytest.mark.parametrize("taken", TAKEN)
def test_a_layer_sliced_from_a_stack_loses_the_layer_dim(taken: str) -> None:
    """The shape of an all-gather of `w` in a layer of a stage; an activation keeps its batch."""
    row, *_ = rows_in(
        module_text(
            f"""\
  %stack = f32[2,8] parameter(0)
  %one = f32[1,8] parameter(1)
{TAKEN[taken]}  ROOT %g = f32[1,16] all-gather(%w), channel_id=1, replica_groups={{{{0,1}},{{2,3}}}}, """
            "dimensions={1}, use_global_device_ids=true, metadata={op_name="
            '"jit(f)/decode/stages0-1by1/microbatches1of1/layer0/mlp/all_gather"}',
            header=", num_partitions=4",
        ),
        "pp=2,tp=2",
    )
    assert row.shape == ((1, 16) if taken.startswith("an activation") else (16,))
