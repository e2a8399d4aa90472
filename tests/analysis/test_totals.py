"""Totals of a step and of a request, groups over layers, and what could not be placed: parts sum to the whole."""

from dataclasses import replace
from fractions import Fraction

import pytest
from made import collective

from meshscope.analysis.totals import (
    NO_REASON,
    Group,
    Total,
    Unattributed,
    grouped,
    layer_ranges,
    request_totals,
    step_totals,
    unattributed,
)
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Kind, Part, Phase


def _row(
    phase: Phase = Phase.DECODE, kind: Kind = Kind.ALL_REDUCE, *shape: int, **facts: object
) -> Collective:
    known: dict[str, object] = {"layer": 0, "part": Part.MLP, "groups": ((0, 1, 2),)}
    return collective(kind, shape, phase=phase, **known | facts)


ROWS = [
    _row(Phase.PREFILL, Kind.ALL_REDUCE, 100, count=2),
    _row(Phase.PREFILL, Kind.ALL_GATHER, 30),
    _row(Phase.DECODE, Kind.ALL_REDUCE, 5, count=4, n_steps=127),
]
ROW = _row(Phase.PREFILL, Kind.ALL_REDUCE, 2, 8, 16, part=Part.ATTN, groups=((0, 1, 2, 3),))


def test_a_step_counts_every_operation_once_and_a_request_every_step() -> None:
    prefill = Total(
        count=3,
        payload_bytes=2 * 200 + 60,
        wire_bytes=2 * 200 * Fraction(4, 3) + 60 * Fraction(2, 3),
        n_unsized=0,
    )
    step, request = (
        Total(count=4 * n, payload_bytes=40 * n, wire_bytes=40 * n * Fraction(4, 3), n_unsized=0)
        for n in (1, 127)
    )
    assert step_totals(ROWS) == {Phase.PREFILL: prefill, Phase.DECODE: step}
    assert request_totals(ROWS) == {Phase.PREFILL: prefill, Phase.DECODE: request}
    assert request_totals([]) == {}


def test_a_transfer_is_sent_once() -> None:
    both = [_row(Phase.DECODE, k, 8, groups=((0, 1),)) for k in (Kind.SEND, Kind.RECV)]
    total = step_totals(both)[Phase.DECODE]
    assert (total.count, total.wire_bytes) == (2, 16)


def test_collectives_without_phase_or_size_are_counted_separately() -> None:
    unknown = replace(ROWS[2], phase=None, shape=None, payload_bytes=None, wire_bytes=None)
    totals = request_totals([*ROWS, unknown])
    assert totals[None] == Total(
        count=4 * 127, payload_bytes=0, wire_bytes=Fraction(0), n_unsized=4 * 127
    )
    assert {phase: totals[phase] for phase in REQUEST_PHASES} == request_totals(ROWS)


def layers(*indices: int | None, **changes: object) -> list[Collective]:
    return [replace(ROW, layer=index, **changes) for index in indices]


def test_rows_that_differ_in_layer_are_one_group_with_the_sum_of_their_counts_and_a_shared_name() -> (
    None
):
    rows = [*layers(0, 1), *layers(2, count=3)]
    assert grouped(rows) == [Group(row=replace(ROW, layer=None, count=5), layers=(0, 1, 2))]
    assert grouped(layers(7, 7)) == [Group(row=replace(ROW, layer=7, count=2), layers=(7,))]
    assert [group.layers for group in grouped(layers(None, 3, 4))] == [(), (3, 4)]
    one, other = layers(0, hlo_name="all-reduce.1"), layers(1, hlo_name="all-reduce.2")
    assert [grouped(rows)[0].row.hlo_name for rows in (one, one + other)] == ["all-reduce.1", None]


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


@pytest.mark.parametrize(
    ("indices", "words"),
    [((), ""), ((4,), "4"), ((0, 1), "0-1"), ((0, 1, 2, 5, 7, 8), "0-2, 5, 7-8")],
)
def test_layer_ranges(indices: tuple[int, ...], words: str) -> None:
    assert layer_ranges(indices) == words


def test_times_of_a_group_are_means_over_executions_from_the_first_start() -> None:
    rows = [
        *layers(0, count=1, start_s=0.3, dur_s=1.0, exposed_s=1.0),
        *layers(1, count=3, start_s=0.1, dur_s=2.0, exposed_s=0.0),
    ]
    (group,) = grouped(rows)
    assert group.row.count == 4
    assert (group.row.start_s, group.row.dur_s, group.row.exposed_s) == (0.1, 1.75, 0.25)
    (unknown,) = grouped([rows[0], *layers(1)])
    assert unknown.row.dur_s is None


PLACED = _row(Phase.DECODE, Kind.ALL_REDUCE, 4, 8, layer=None, part=Part.EMBED, groups=((0, 1),))


def test_what_could_not_be_placed_is_counted_with_its_reason_and_bytes() -> None:
    """A caveat of the reader counts even if everything is known."""
    assert unattributed([PLACED] * 2) == Unattributed(count=0, payload_bytes=0, reasons=())
    rows = [
        PLACED,
        replace(PLACED, axis=None, axis_reason="no axis has these groups", count=3),
        replace(PLACED, part=None, axis_reason="no scope", payload_bytes=None),
        replace(PLACED, phase=None),
    ]
    assert unattributed(rows) == Unattributed(
        count=5,
        payload_bytes=(3 + 1) * 4 * 8 * 2,
        reasons=(("no axis has these groups", 3), ("no scope", 1), (NO_REASON, 1)),
    )
    assert unattributed(rows[2:3]).payload_bytes is None
    doubtful = replace(PLACED, axis_reason="how often the loop runs is unknown")
    assert unattributed([doubtful]).reasons == (("how often the loop runs is unknown", 1),)
