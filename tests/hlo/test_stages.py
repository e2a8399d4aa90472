"""Pipeline programs: the rows of each stage and their execution counts."""

import pytest

from meshscope.events.collective import Collective, Groups
from meshscope.events.enums import Kind, Part, Phase
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.parse import parse_hlo

MESH = Mesh(axes=(("pp", 2), ("tp", 2)))
STAGE_0, STAGE_1 = ((0, 1),), ((2, 3),)

ComparedRow = tuple[int | None, int | None, Part | None, Kind, Groups, int]


def _psum(name: str, operand: str, scope: str, groups: str = "{{0,1},{2,3}}") -> str:
    return (
        f"  %{name} = f32[8] all-reduce(%{operand}), channel_id=1, replica_groups={groups}, "
        "use_global_device_ids=true, to_apply=%add, "
        f'metadata={{op_name="jit(f)/decode/{scope}/psum"}}\n'
    )


def _tick(x: str, out: str, suffix: str = "") -> str:
    """A tick: a busy stage takes its branch, then all stages send."""
    return (
        f"  %y{suffix} = f32[8] conditional(%which, %{x}, %{x}), "
        "branch_computations={%idle, %busy}\n"
        f"  %{out} = f32[8] collective-permute(%y{suffix}), channel_id=1, "
        "source_target_pairs={{0,2},{1,3}}, "
        'metadata={op_name="jit(f)/decode/while/body/stage0/stage/ppermute"}\n'
    )


def _program(busy: str, entry: str, loop: str = "") -> str:
    return f"""HloModule m, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%idle (i: f32[8]) -> f32[8] {{
  ROOT %i = f32[8] parameter(0)
}}

%busy (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
{busy}  ROOT %busy_out = f32[8] negate(%x)
}}
{loop}
ENTRY %main (x: f32[8], which: s32[]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %which = s32[] parameter(1)
{entry}  ROOT %r = f32[8] negate(%x)
}}
"""


def _loop(n: int) -> str:
    return f"""
%ticks (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %p = (s32[], f32[8], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %carried = f32[8] get-tuple-element(%p), index=1
  %which = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
{_tick("carried", "received")}  ROOT %t = (s32[], f32[8], s32[]) tuple(%next, %received, %which)
}}

%more (q: (s32[], f32[8], s32[])) -> pred[] {{
  %q = (s32[], f32[8], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant({n})
  ROOT %less = pred[] compare(%j, %n), direction=LT
}}
"""


WHILE = """  %zero = s32[] constant(0)
  %init = (s32[], f32[8], s32[]) tuple(%zero, %x, %which)
  %while = (s32[], f32[8], s32[]) while(%init), condition=%more, body=%ticks
"""


def _rows(text: str) -> list[Collective]:
    return collectives_of(
        parse_hlo(text, "m.hlo"),
        mesh=MESH,
        n_steps_of={Phase.DECODE: 9},
        crosses_slices=lambda _: None,
    )


def _compared(rows: list[Collective]) -> list[ComparedRow]:
    return [(r.stage, r.layer, r.part, r.kind, r.groups, r.count) for r in rows]


def _layers_of_both(count: int) -> list[ComparedRow]:
    return [
        (0, 0, Part.MLP, Kind.ALL_REDUCE, STAGE_0, count),
        (1, 2, Part.MLP, Kind.ALL_REDUCE, STAGE_1, count),
        (0, 1, Part.MLP, Kind.ALL_REDUCE, STAGE_0, count),
        (1, 3, Part.MLP, Kind.ALL_REDUCE, STAGE_1, count),
    ]


BUSY = "".join(
    _psum(f"l{i}", "x", f"while/body/cond/branch_1_fun/stages0-1by2/microbatches2of3/layer{i}/mlp")
    for i in range(2)
)
STAGE_SEND: ComparedRow = (0, None, Part.STAGE, Kind.PERMUTE, ((0, 2), (1, 3)), 3)


def test_layers_shared_by_stages_have_a_row_per_stage_and_count_microbatches() -> None:
    """Three ticks, two microbatches; the sender sends in every tick."""
    rows = _rows(_program(BUSY, WHILE, _loop(3)))

    assert _compared(rows) == [*_layers_of_both(2), STAGE_SEND]
    assert {row.axis_reason for row in rows} == {None}
    assert {row.axis for row in rows} == {"tp", "pp"}


def test_unrolled_ticks_count_alike() -> None:
    ticks = _tick("x", "a", "0") + _tick("a", "b", "1") + _tick("b", "c", "2")

    rows = _rows(_program(BUSY, ticks))

    assert _compared(rows)[:4] == _layers_of_both(2)
    assert sum(row.count for row in rows if row.part is Part.STAGE) == 3
    assert {row.axis_reason for row in rows} == {None}


def test_a_peeled_tick_counts_with_its_loop() -> None:
    text = _program(BUSY, _tick("x", "a", "0") + WHILE, _loop(2))

    of_layers = [row for row in _compared(_rows(text)) if row[2] is Part.MLP]
    assert sorted(of_layers, key=str) == sorted(_layers_of_both(2), key=str)


def test_scanned_layers_of_a_stage_share_an_instruction() -> None:
    scope = "while/body/cond/branch_1_fun/stages0-1by2/microbatches2of3/layers0-1/mlp"
    twice = _psum("l0", "x", scope) + _psum("l1", "l0", scope)

    rows = _rows(_program(twice, WHILE, _loop(3)))

    assert sorted(_compared(rows), key=str) == sorted([*_layers_of_both(2), STAGE_SEND], key=str)


def test_the_branch_of_a_stage_has_no_caveat_but_one_within_it_has() -> None:
    head = _psum("h", "x", "stage1/cond/branch_1_fun/lm_head")
    within = "  %w = f32[8] conditional(%which, %x, %x), branch_computations={%idle, %busy}\n"
    between = f"""
%between (z: f32[8], which: s32[]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %which = s32[] parameter(1)
{within}  ROOT %out = f32[8] negate(%w)
}}
"""
    outer = "  %v = f32[8] conditional(%which, %x, %x), branch_computations={%idle, %between}\n"

    (row,) = _rows(_program(head, within))
    assert (row.stage, row.groups, row.axis_reason) == (1, STAGE_1, None)
    (row,) = _rows(_program(head, outer, between))
    assert row.axis_reason == "a branch of conditional 'w', counted as taken"


def test_a_branch_outside_stages_has_a_caveat() -> None:
    (row,) = _rows(_program(_psum("h", "x", "layer0/mlp"), _tick("x", "a")))[:1]

    assert (row.stage, row.axis_reason) == (None, "a branch of conditional 'y', counted as taken")


def test_operations_of_all_stages_together_have_no_stage() -> None:
    (row,) = _rows(_program("", _psum("s", "x", "sample", "{{0,2},{1,3}}")))

    assert (row.stage, row.axis, row.groups) == (None, "pp", ((0, 2), (1, 3)))


@pytest.mark.parametrize("n", [2, 4])
def test_a_loop_that_disagrees_with_its_scope_has_a_caveat(n: int) -> None:
    busy = _psum("l", "x", "while/body/cond/stages0-1by2/microbatches2of3/layers0-1/mlp")
    rows = _rows(_program(busy, WHILE, _loop(n)))

    (reason,) = {row.axis_reason for row in rows if row.part is Part.MLP and row.stage == 0}
    assert reason is not None
    assert reason == (
        f"the scope says layers 0 to 1 and 3 ticks of a pipeline, but the operation runs {n} times"
    )


def test_a_stage_outside_the_mesh_is_none() -> None:
    (row,) = _rows(_program("", _psum("s", "x", "stage7/lm_head")))

    assert (row.stage, row.groups) == (None, ((0, 1), (2, 3)))


def test_a_stage_send_across_slices_has_no_op_name() -> None:
    """libtpu gives sends no op_name, and the initial value of the loop has no user."""
    where = 'metadata={op_name="jit(f)/decode/broadcast_in_dim"}'
    text = f"""HloModule m, num_partitions=2

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %y = f32[8] negate(%x), {where}
  %begin = token[] after-all()
  %send = (f32[8], u32[], token[]) send(%y, %begin), channel_id=2, is_host_transfer=true, {SENT}
  %recv = (f32[8], u32[], token[]) recv(%begin), channel_id=1, is_host_transfer=true, {SENT}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %done = (f32[8], token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %z = f32[8] get-tuple-element(%done), index=0
  ROOT %r = f32[8] negate(%z)
}}
"""
    (row,) = collectives_of(
        parse_hlo(text, "m.hlo"),
        mesh=MESH,
        n_steps_of={Phase.DECODE: 9},
        crosses_slices=lambda groups: any(group[0] // 2 != group[-1] // 2 for group in groups),
    )

    assert _compared([row]) == [(0, None, Part.STAGE, Kind.PERMUTE, ((0, 2), (1, 3)), 1)]
    assert (row.axis, row.axis_reason, row.crosses_slices) == ("pp", None, True)


SENT = (
    'frontend_attributes={_xla_host_transfer_rendezvous="p_0",'
    "_xla_megascale_target={{100000->200000},{100001->200001}},"
    '_xla_megascale_transfer_type="ONE_TO_ONE"}'
)

IN_LAYER = "stages0-1by1/microbatches1of1/layer0/mlp"
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
}


@pytest.mark.parametrize("taken", TAKEN)
def test_a_layer_sliced_from_a_stack_loses_the_layer_dim(taken: str) -> None:
    assert _gathered(TAKEN[taken]) == (16,)


def test_an_activation_of_one_sequence_keeps_its_batch() -> None:
    assert _gathered("  %w = f32[1,8] negate(%one)\n") == (1, 16)


def _gathered(taken: str) -> tuple[int, ...] | None:
    """The shape of an all-gather of `w` in a layer of a stage."""
    (row,) = _rows(
        f"""HloModule m, num_partitions=4

ENTRY %main (stack: f32[2,8], one: f32[1,8], alone: f32[1,8]) -> f32[1,16] {{
  %stack = f32[2,8] parameter(0)
  %one = f32[1,8] parameter(1)
{taken}  ROOT %g = f32[1,16] all-gather(%w), channel_id=1, replica_groups={{{{0,1}},{{2,3}}}}, """
        f"dimensions={{1}}, use_global_device_ids=true, "
        f'metadata={{op_name="jit(f)/decode/{IN_LAYER}/all_gather"}}\n}}\n'
    )[:1]
    return row.shape
