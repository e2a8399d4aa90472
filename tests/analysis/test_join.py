"""Comparisons of small hand-written tables; `left` is the prediction."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import NamedTuple

import pytest
from made import collective

from meshscope.analysis.join import Comparison, Verdict, compare, left_rows, right_rows
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase

TP4 = ((0, 1, 2, 3), (4, 5, 6, 7))
DP2 = ((0, 4), (1, 5), (2, 6), (3, 7))


def row(
    kind: Kind = Kind.ALL_REDUCE,
    shape: tuple[int, ...] = (2, 8, 16),
    *,
    layer: int | None = 0,
    part: Part | None = Part.ATTN,
    **changes: object,
) -> Collective:
    made = collective(kind, shape, layer=layer, part=Part.ATTN, groups=TP4)
    return replace(made, part=part, **changes)


class ShortMatch(NamedTuple):
    """The fields of a match that the tests compare."""

    verdict: Verdict
    layers: tuple[int, ...]
    count: int
    note: str | None = None


def short(comparison: Comparison) -> list[ShortMatch]:
    return [ShortMatch(m.verdict, m.layers, m.count, m.note) for m in comparison.matches]


def test_equal_tables_are_exact() -> None:
    rows = [row(layer=i, part=p) for i in range(3) for p in (Part.ATTN, Part.MLP)]
    comparison = compare(rows, rows)
    assert comparison.is_exact
    assert short(comparison) == [
        ShortMatch(Verdict.EQUAL, (0, 1, 2), 3),
        ShortMatch(Verdict.EQUAL, (0, 1, 2), 3),
    ]


def test_empty_tables_are_exact() -> None:
    assert compare([], []) == Comparison(matches=())
    assert compare([], []).is_exact


def test_opcode_algorithm_and_source_line_do_not_matter() -> None:
    other = row(
        opcode="all-reduce", algorithm="Ring", hlo_name="x", source_line="m.py:1", is_async=True
    )
    assert compare([row()], [other]).is_exact


def test_the_order_of_groups_does_not_matter() -> None:
    assert compare([row()], [row(groups=((7, 6, 5, 4), (3, 2, 1, 0)))]).is_exact


def test_pairs_of_a_permute_keep_their_direction() -> None:
    there = row(Kind.PERMUTE, groups=((0, 1), (1, 0), (2, 3)))
    back = row(Kind.PERMUTE, groups=((0, 1), (1, 0), (3, 2)))
    assert short(compare([there], [back])) == [
        ShortMatch(Verdict.CHANGED, (0,), 1, "different devices in the groups")
    ]
    assert compare([there], [replace(there, groups=((2, 3), (0, 1), (1, 0)))]).is_exact


def test_counts_match_one_by_one() -> None:
    comparison = compare([row(count=3)], [row(), row(hlo_name="b")])
    assert short(comparison) == [
        ShortMatch(Verdict.EQUAL, (0,), 2),
        ShortMatch(Verdict.MISSING, (0,), 1),
    ]


def test_the_same_array_in_another_shape_is_equal_with_a_note() -> None:
    comparison = compare([row(shape=(2, 8, 16))], [row(shape=(16, 16))])
    assert short(comparison) == [ShortMatch(Verdict.EQUAL, (0,), 1, "written as [16,16]")]
    assert comparison.is_exact


def test_the_same_meaning_has_more_bytes_one_way_and_fewer_the_other() -> None:
    predicted = row(Kind.REDUCE_SCATTER)
    compiled = replace(predicted, opcode="all-reduce", wire_bytes=predicted.wire_bytes * 2)  # type: ignore[operator]
    there, back = compare([predicted], [compiled]), compare([compiled], [predicted])
    assert short(there) == [ShortMatch(Verdict.MORE_BYTES, (0,), 1)]
    assert short(back) == [ShortMatch(Verdict.FEWER_BYTES, (0,), 1)]
    assert (there.is_exact, there.is_same_meaning) == (False, True)


def test_unknown_wire_bytes_are_no_finding() -> None:
    assert compare([row()], [row(wire_bytes=None)]).is_exact


class Change(NamedTuple):
    """A row that differs from the default row, and the note about the difference."""

    name: str
    right: Collective
    note: str


CHANGES = (
    Change("kind", row(Kind.REDUCE_SCATTER), "all_reduce -> reduce_scatter"),
    Change("kind to gather", row(Kind.ALL_GATHER), "all_reduce -> all_gather"),
    Change("shape", row(shape=(2, 8, 32)), "bf16[2,8,16] -> bf16[2,8,32]"),
    Change("axis", row(axis="dp", groups=DP2, group_size=2), "tp -> dp"),
    Change("no axis", row(axis=None, groups=DP2), "tp -> ?"),
    Change("groups", row(groups=((0, 1, 2, 4), (3, 5, 6, 7))), "different devices in the groups"),
    Change("dtype", row(dtype="f32", payload_bytes=2 * 8 * 16 * 4), "bf16[2,8,16] -> f32[2,8,16]"),
    Change("part", row(part=Part.MLP), "in mlp, not attn"),
    Change("no part", row(part=None), "in an unknown part, not attn"),
    Change("no layer", row(layer=None), "in an unknown layer"),
    Change("layer", row(layer=4), "in another layer"),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.name)
def test_a_difference_is_changed_with_a_note(change: Change) -> None:
    assert short(compare([row()], [change.right])) == [
        ShortMatch(Verdict.CHANGED, (0,), 1, change.note)
    ]


def test_rows_with_nothing_in_common_are_missing_and_extra() -> None:
    other = row(Kind.ALL_GATHER, (512,), axis="dp", groups=DP2)
    assert [t.verdict for t in short(compare([row()], [other]))] == [Verdict.MISSING, Verdict.EXTRA]


def test_a_gather_of_weights_is_not_changed_into_a_gather_of_indices() -> None:
    """Part, kind and axis are equal, but dtype and shape differ: two findings, not one."""
    weights, indices = row(Kind.ALL_GATHER, (512, 64)), row(Kind.ALL_GATHER, (16,), dtype="s32")
    assert [t.verdict for t in short(compare([weights], [indices]))] == [
        Verdict.MISSING,
        Verdict.EXTRA,
    ]


def test_phases_never_mix() -> None:
    comparison = compare([row()], [row(phase=Phase.DECODE)])
    assert [t.verdict for t in short(comparison)] == [Verdict.MISSING, Verdict.EXTRA]
    assert comparison.phases == [Phase.PREFILL, Phase.DECODE]


def test_an_all_reduce_pairs_with_the_reduce_scatter_and_leaves_the_gather() -> None:
    """Sequence parallelism replaces an all-reduce; the order of its two collectives does not matter."""
    scatter, gather = row(Kind.REDUCE_SCATTER), row(Kind.ALL_GATHER)
    for right in ([scatter, gather], [gather, scatter]):
        comparison = compare([row()], right)
        assert short(comparison) == [
            ShortMatch(Verdict.CHANGED, (0,), 1, "all_reduce -> reduce_scatter"),
            ShortMatch(Verdict.EXTRA, (0,), 1),
        ]
        assert comparison.matches[1].right == replace(gather, layer=None)


def test_an_exact_match_precedes_a_similar_one() -> None:
    exact, similar = row(), row(shape=(2, 8, 32))
    comparison = compare([exact], [similar, exact])
    assert short(comparison) == [
        ShortMatch(Verdict.EQUAL, (0,), 1),
        ShortMatch(Verdict.EXTRA, (0,), 1),
    ]


def test_layers_with_the_same_finding_are_one_match() -> None:
    left = [row(layer=i) for i in range(4)]
    right = [row(layer=0), row(Kind.REDUCE_SCATTER, layer=1), row(Kind.REDUCE_SCATTER, layer=2)]
    assert short(compare(left, right)) == [
        ShortMatch(Verdict.EQUAL, (0,), 1),
        ShortMatch(Verdict.CHANGED, (1, 2), 2, "all_reduce -> reduce_scatter"),
        ShortMatch(Verdict.MISSING, (3,), 1),
    ]


def test_matches_come_in_the_order_of_the_model() -> None:
    left = [row(part=Part.LM_HEAD, layer=None), row(part=Part.EMBED, layer=None)]
    right = [row(Kind.ALL_GATHER, (9,), part=Part.MLP, layer=0), *left]
    parts = [match.shown.part for match in compare(left, right).matches]
    assert parts == [Part.EMBED, Part.MLP, Part.LM_HEAD]


def test_nothing_is_lost_or_counted_twice() -> None:
    """The matches of random tables contain the operations and bytes of each side."""
    random = Random(7)

    def table() -> list[Collective]:
        return [
            row(
                random.choice([Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER]),
                random.choice([(2, 8, 16), (16, 16), (64,)]),
                layer=random.choice([None, 0, 1, 2]),
                part=random.choice([None, Part.ATTN, Part.MLP]),
                axis=random.choice(["tp", "dp", None]),
                count=random.randint(1, 4),
            )
            for _ in range(30)
        ]

    for _ in range(50):
        left, right = table(), table()
        comparison = compare(left, right)
        assert _volume(left_rows(comparison.matches)) == _volume(left)
        assert _volume(right_rows(comparison.matches)) == _volume(right)


def _volume(rows: list[Collective]) -> Counter[Kind]:
    volume: Counter[Kind] = Counter()
    for one in rows:
        volume[one.kind] += one.count * (one.payload_bytes or 0)
    return volume


def test_wire_bytes_read_back_from_a_float_are_equal() -> None:
    """2/3 of the payload has no exact float, and both sides were stored as one."""
    thirds = row(groups=((0, 1, 2),), group_size=3, wire_bytes=Fraction(float(Fraction(1024, 3))))
    assert compare([thirds], [thirds]).is_exact


def test_a_repeated_collective_is_the_surplus_whatever_its_place_in_the_table() -> None:
    kept, repeated = row(inserted_by="program"), row(inserted_by="rematerialization")
    comparison = compare([row()], [repeated, kept])

    assert [(m.verdict, m.shown.inserted_by) for m in comparison.matches] == [
        (Verdict.EQUAL, "program"),
        (Verdict.EXTRA, "rematerialization"),
    ]
