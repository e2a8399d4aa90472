"""Groups over layers: every row is in one group, whose members differ only in the layer."""

from dataclasses import replace

import pytest

from meshscope.analysis.totals import Group, grouped, layer_ranges
from meshscope.events.collective import Collective, predicted_collective
from meshscope.events.enums import Kind, Part, Phase

ROW = predicted_collective(
    phase=Phase.PREFILL,
    layer=0,
    part=Part.ATTN,
    kind=Kind.ALL_REDUCE,
    axis="tp",
    groups=((0, 1, 2, 3),),
    dtype="bf16",
    shape=(2, 8, 16),
)


def layers(*indices: int | None, **changes: object) -> list[Collective]:
    return [replace(ROW, layer=index, **changes) for index in indices]


def test_rows_that_differ_in_layer_are_one_group_with_the_sum_of_their_counts() -> None:
    rows = [*layers(0, 1), *layers(2, count=3)]
    assert grouped(rows) == [Group(row=replace(ROW, layer=None, count=5), layers=(0, 1, 2))]


def test_a_group_of_one_layer_keeps_it() -> None:
    assert grouped(layers(7, 7)) == [Group(row=replace(ROW, layer=7, count=2), layers=(7,))]


def test_a_row_outside_layers_has_its_own_group() -> None:
    assert [group.layers for group in grouped(layers(None, 3, 4))] == [(), (3, 4)]


@pytest.mark.parametrize(
    "changes",
    [
        {"part": Part.MLP},
        {"kind": Kind.ALL_GATHER},
        {"opcode": "all-reduce-scatter"},
        {"axis": "dp"},
        {"groups": ((0, 2), (1, 3))},
        {"dtype": "f32"},
        {"shape": (16, 16)},
        {"algorithm": "StrategyRing"},
        {"source_line": "model.py:3"},
        {"phase": Phase.DECODE},
        {"n_steps": 2},
        {"crosses_slices": True},
    ],
    ids=str,
)
def test_rows_that_differ_in_anything_else_have_separate_groups(changes: dict[str, object]) -> None:
    assert len(grouped([ROW, *layers(1, **changes)])) == 2


def test_a_group_keeps_a_shared_instruction_name() -> None:
    one, other = layers(0, hlo_name="all-reduce.1"), layers(1, hlo_name="all-reduce.2")
    names = [group.row.hlo_name for group in grouped(one)]
    assert (names, grouped([*one, *other])[0].row.hlo_name) == (["all-reduce.1"], None)


def test_groups_add_up_to_the_rows() -> None:
    rows = [*layers(0, 1, 2), *layers(0, 1, part=Part.MLP, count=2), *layers(None, part=Part.EMBED)]
    assert sum(group.row.count for group in grouped(rows)) == sum(row.count for row in rows)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ((), ""),
        ((4,), "4"),
        ((0, 1), "0-1"),
        ((0, 1, 2, 5, 7, 8), "0-2, 5, 7-8"),
    ],
)
def test_layer_ranges(indices: tuple[int, ...], words: str) -> None:
    assert layer_ranges(indices) == words


def test_times_of_a_group_are_means_over_executions_from_the_first_start():
    rows = [
        replace(ROW, layer=0, count=1, start_s=0.3, dur_s=1.0, exposed_s=1.0),
        replace(ROW, layer=1, count=3, start_s=0.1, dur_s=2.0, exposed_s=0.0),
    ]
    (group,) = grouped(rows)
    assert group.row.count == 4
    assert (group.row.start_s, group.row.dur_s, group.row.exposed_s) == (0.1, 1.75, 0.25)


def test_times_of_a_group_are_unknown_if_one_is():
    (group,) = grouped([replace(ROW, layer=0, dur_s=1.0), replace(ROW, layer=1)])
    assert group.row.dur_s is None
