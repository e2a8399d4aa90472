"""Comparisons of small hand-written tables; `left` is the prediction."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import NamedTuple

import pytest
from made import collective, varied

import meshscope
from meshscope.analysis.comparison import Side, explain, phase_changes, promoted
from meshscope.analysis.join import Comparison, Verdict, compare, left_rows, right_rows
from meshscope.analysis.totals import step_totals
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.reports.explanation import sentences
from meshscope.store.run import RunRecord

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
    layers: tuple[int, ...] = (0,)
    count: int = 1
    note: str | None = None


EQUAL, CHANGED = ShortMatch(Verdict.EQUAL), ShortMatch(Verdict.CHANGED)
MISSING, EXTRA = ShortMatch(Verdict.MISSING), ShortMatch(Verdict.EXTRA)
MORE, FEWER = ShortMatch(Verdict.MORE_BYTES), ShortMatch(Verdict.FEWER_BYTES)


def short(comparison: Comparison) -> list[ShortMatch]:
    return [ShortMatch(m.verdict, m.layers, m.count, m.note) for m in comparison.matches]


def test_equal_tables_are_exact() -> None:
    rows = [row(layer=i, part=p) for i in range(3) for p in (Part.ATTN, Part.MLP)]
    comparison = compare(rows, rows)
    assert comparison.is_exact
    assert short(comparison) == [EQUAL._replace(layers=(0, 1, 2), count=3)] * 2
    assert compare([], []) == Comparison(matches=())


# 2/3 of the payload has no exact float, and both sides were stored as one.
THIRDS = row(groups=((0, 1, 2),), group_size=3, wire_bytes=Fraction(float(Fraction(1024, 3))))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (row(), row(opcode="all-reduce", algorithm="Ring", hlo_name="x", source_line="m.py:1", is_async=True)),
        (row(), row(groups=((7, 6, 5, 4), (3, 2, 1, 0)))),
        (row(), row(wire_bytes=None)),
        (THIRDS, THIRDS),
    ],
    ids=["how it runs", "order of groups", "unknown wire bytes", "bytes read back from a float"],
)  # fmt: skip
def test_what_does_not_matter_is_exact(left: Collective, right: Collective) -> None:
    assert compare([left], [right]).is_exact


def test_pairs_of_a_permute_keep_their_direction() -> None:
    there = row(Kind.PERMUTE, groups=((0, 1), (1, 0), (2, 3)))
    back = row(Kind.PERMUTE, groups=((0, 1), (1, 0), (3, 2)))
    changed = CHANGED._replace(note="different devices in the groups")
    assert short(compare([there], [back])) == [changed]
    assert compare([there], [replace(there, groups=((2, 3), (0, 1), (1, 0)))]).is_exact


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([row(count=3)], [row(), row(hlo_name="b")], [EQUAL._replace(count=2), MISSING]),
        ([row()], [row(shape=(16, 16))], [EQUAL._replace(note="written as [16,16]")]),
        ([row()], [row(shape=(2, 8, 32)), row()], [EQUAL, EXTRA]),
    ],
    ids=["counts match one by one", "the same array in another shape", "exact before similar"],
)
def test_equal_rows_are_matched(left, right, expected) -> None:
    comparison = compare(left, right)
    assert short(comparison) == expected
    assert comparison.is_exact == (len(expected) == 1)


def test_the_same_meaning_has_more_bytes_one_way_and_fewer_the_other() -> None:
    predicted = row(Kind.REDUCE_SCATTER)
    compiled = replace(predicted, opcode="all-reduce", wire_bytes=predicted.wire_bytes * 2)
    there, back = compare([predicted], [compiled]), compare([compiled], [predicted])
    assert (short(there), short(back)) == ([MORE], [FEWER])
    assert (there.is_exact, there.is_same_meaning) == (False, True)


CHANGES = {
    "kind": (row(Kind.REDUCE_SCATTER), "all_reduce -> reduce_scatter"),
    "kind to gather": (row(Kind.ALL_GATHER), "all_reduce -> all_gather"),
    "shape": (row(shape=(2, 8, 32)), "bf16[2,8,16] -> bf16[2,8,32]"),
    "axis": (row(axis="dp", groups=DP2, group_size=2), "tp -> dp"),
    "no axis": (row(axis=None, groups=DP2), "tp -> ?"),
    "groups": (row(groups=((0, 1, 2, 4), (3, 5, 6, 7))), "different devices in the groups"),
    "dtype": (row(dtype="f32", payload_bytes=2 * 8 * 16 * 4), "bf16[2,8,16] -> f32[2,8,16]"),
    "part": (row(part=Part.MLP), "in mlp, not attn"),
    "no part": (row(part=None), "in an unknown part, not attn"),
    "no layer": (row(layer=None), "in an unknown layer"),
    "layer": (row(layer=4), "in another layer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_changed_with_a_note(change: str) -> None:
    right, note = CHANGES[change]
    assert short(compare([row()], [right])) == [CHANGED._replace(note=note)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (row(), row(Kind.ALL_GATHER, (512,), axis="dp", groups=DP2)),
        (row(Kind.ALL_GATHER, (512, 64)), row(Kind.ALL_GATHER, (16,), dtype="s32")),
        (row(), row(phase=Phase.DECODE)),
    ],
    ids=["nothing in common", "a gather of weights and of indices", "another phase"],
)
def test_rows_that_differ_in_most_are_missing_and_extra(left, right) -> None:
    comparison = compare([left], [right])
    assert [match.verdict for match in short(comparison)] == [Verdict.MISSING, Verdict.EXTRA]
    assert comparison.phases == list(dict.fromkeys([left.phase, right.phase]))


def test_an_all_reduce_pairs_with_the_reduce_scatter_and_leaves_the_gather() -> None:
    """Sequence parallelism replaces an all-reduce; the order of its two collectives does not matter."""
    scatter, gather = row(Kind.REDUCE_SCATTER), row(Kind.ALL_GATHER)
    for right in ([scatter, gather], [gather, scatter]):
        comparison = compare([row()], right)
        assert short(comparison) == [CHANGED._replace(note="all_reduce -> reduce_scatter"), EXTRA]
        assert comparison.matches[1].right == replace(gather, layer=None)


def test_layers_with_the_same_finding_are_one_match_in_the_order_of_the_model() -> None:
    left = [row(layer=i) for i in range(4)]
    right = [row(layer=0), row(Kind.REDUCE_SCATTER, layer=1), row(Kind.REDUCE_SCATTER, layer=2)]
    assert short(compare(left, right)) == [
        EQUAL,
        CHANGED._replace(layers=(1, 2), count=2, note="all_reduce -> reduce_scatter"),
        MISSING._replace(layers=(3,)),
    ]
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

    def volume(rows: list[Collective]) -> Counter[Kind]:
        volume: Counter[Kind] = Counter()
        for one in rows:
            volume[one.kind] += one.count * (one.payload_bytes or 0)
        return volume

    for _ in range(50):
        left, right = table(), table()
        matches = compare(left, right).matches
        assert volume(left_rows(matches)) == volume(left)
        assert volume(right_rows(matches)) == volume(right)


def test_a_repeated_collective_is_the_surplus_whatever_its_place_in_the_table() -> None:
    kept, repeated = row(inserted_by="program"), row(inserted_by="rematerialization")
    comparison = compare([row()], [repeated, kept])

    assert [(m.verdict, m.shown.inserted_by) for m in comparison.matches] == [
        (Verdict.EQUAL, "program"),
        (Verdict.EXTRA, "rematerialization"),
    ]


PREDICTED = collective(Kind.ALL_REDUCE, (2, 8))


def compiled(dtype: str, n_bytes: int) -> Collective:
    wire_bytes = PREDICTED.wire_bytes * n_bytes / 32
    return replace(
        PREDICTED, source=Source.COMPILED, dtype=dtype, payload_bytes=n_bytes, wire_bytes=wire_bytes
    )


def test_a_promoted_collective_is_predicted_in_float32() -> None:
    rows = [compiled("f32", 64)]
    predicted, count = promoted([PREDICTED], rows)
    assert count == 1
    assert compare(predicted, rows).is_exact


def test_a_collective_that_stays_16_bit_is_unchanged() -> None:
    for rows in ([compiled("bf16", 32)], [compiled("bf16", 32), compiled("f32", 64)], []):
        assert promoted([PREDICTED], rows) == ((PREDICTED,), 0)


def record(**versions: str) -> RunRecord:
    """A run that counts as compiled, by a compiler of these versions."""
    made = meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", layers=2).record
    rows = tuple(
        replace(row, source=Source.COMPILED, opcode="all-reduce", algorithm="Ring", is_async=False)
        for row in made.rows
    )
    memory = {Source.COMPILED: made.memory[Source.PREDICTED]}
    facts = {"source": Source.COMPILED, "versions": versions}
    return varied(made, manifest=facts, rows=rows, memory=memory)


def side(name: str, run: RunRecord) -> Side:
    return Side(name=name, run=run, source=Source.COMPILED)


@pytest.fixture(scope="module")
def old() -> RunRecord:
    return record(jax="0.9.2", libtpu="0.0.37")


@pytest.fixture(scope="module")
def new() -> RunRecord:
    return record(jax="0.10.2", libtpu="0.0.42.1")


def words(left: RunRecord, right: RunRecord) -> list[str]:
    return sentences(explain(side("A", left), side("B", right)))


def test_equal_programs_of_two_compilers_are_said_to_be_equal(old, new) -> None:
    *_, memory, forms = words(old, new)
    assert memory.endswith("on a device, the same in A and B.")
    assert forms.startswith("Collectives run alike")


def test_memory_and_algorithms_that_change_are_named(old, new) -> None:
    before = new.memory[Source.COMPILED]
    grown = replace(before, total_bytes=before.total_bytes + 3_000_000)
    rows = tuple(
        replace(row, algorithm="Pincer", is_async=True) if row.phase == "decode" else row
        for row in new.rows
    )
    *_, memory, decode = words(old, replace(new, rows=rows, memory={Source.COMPILED: grown}))
    assert "+3 MB" in memory
    assert decode.startswith("decode: ")
    assert "5 all-reduces over tp (asynchronous, Pincer)" in decode
    assert "in B run as 5 all-reduces over tp (Ring)" in decode


def test_only_another_compiler_is_compared_so(old, new) -> None:
    assert explain(side("A", old), side("B", old)).forms is None
    predicted = meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8,sp", layers=2)
    plan = predicted.record.manifest.experiment
    other = varied(new, manifest={"experiment": plan})
    assert explain(side("A", old), side("B", other)).forms is None


@pytest.mark.parametrize("n", [1, 3])
def test_a_form_counts_its_executions(n: int, old, new) -> None:
    rows = (replace(old.rows[0], count=n),)
    change = explain(side("A", replace(old, rows=rows)), side("B", replace(new, rows=()))).forms
    assert list(change.values()) == [(n, 0)]


def made(kind: Kind, part: Part, *, n: int = 8, count: int = 1, axis: str = "tp"):
    return collective(kind, (n,), part=part, axis=axis, count=count)


LEFT = [made(Kind.ALL_REDUCE, Part.MLP, count=3), made(Kind.ALL_GATHER, Part.ATTN, axis="dp")]
RIGHT = [
    made(Kind.REDUCE_SCATTER, Part.MLP, count=3),
    made(Kind.ALL_GATHER, Part.MLP, count=3),
    made(Kind.ALL_GATHER, Part.ATTN, axis="dp", n=80),
]


def test_places_sum_to_the_totals_of_both_sides() -> None:
    (change,) = phase_changes(LEFT, RIGHT, left_costs={}, right_costs={})
    totals = [step_totals(rows)[Phase.PREFILL] for rows in (LEFT, RIGHT)]
    assert change.wire_bytes == (totals[0].wire_bytes, totals[1].wire_bytes)
    assert change.count == (totals[0].count, totals[1].count)
    assert (
        sum(place.wire_change for place in change.places)
        == totals[1].wire_bytes - totals[0].wire_bytes
    )


def test_the_largest_change_comes_first() -> None:
    (change,) = phase_changes(LEFT, RIGHT, left_costs={}, right_costs={})
    assert [(place.axis, place.part) for place in change.places] == [("dp", "attn"), ("tp", "mlp")]
    assert change.places[0].wire_change == Fraction(3, 4) * 144
    assert change.places[1].wire_change == 0
    assert change.places[1].left != change.places[1].right
    assert change.places[1].right.kinds == (("all_gather", 3), ("reduce_scatter", 3))


def test_a_side_without_rows_is_all_missing() -> None:
    (change,) = phase_changes(LEFT, [], left_costs={}, right_costs={})
    assert change.wire_bytes[1] == 0
    assert change.count == (4, 0)
