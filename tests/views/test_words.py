"""Phrases about collectives and comparisons."""

from dataclasses import replace

import pytest

from meshscope.analysis.join import compare
from meshscope.events.collective import Collective, predicted_collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.store.run import RunRecord
from meshscope.views.words import (
    array_words,
    group_words,
    opcode_words,
    signed_bytes,
    source_words,
    verdict_words,
)

ROW = predicted_collective(
    phase=Phase.PREFILL,
    layer=0,
    part=Part.MLP,
    kind=Kind.ALL_REDUCE,
    axis="tp",
    groups=((0, 1, 2, 3), (4, 5, 6, 7)),
    dtype="bf16",
    shape=(2, 8, 64),
)


def test_groups_are_told_by_number_and_size_and_marked_across_slices() -> None:
    permute = replace(ROW, kind=Kind.PERMUTE, groups=((0, 1), (1, 0), (2, 3)))
    rows = [ROW, replace(ROW, crosses_slices=False), replace(ROW, crosses_slices=True), permute]
    assert [group_words(row) for row in rows] == ["2 x 4", "2 x 4", "2 x 4 DCN", "3 pairs"]


def test_unknown_arrays_are_question_marks() -> None:
    rows = [ROW, replace(ROW, shape=()), replace(ROW, shape=None), replace(ROW, dtype=None)]
    assert [array_words(row) for row in rows] == ["bf16[2,8,64]", "bf16[]", "bf16[?]", "?[2,8,64]"]


@pytest.mark.parametrize(
    ("kind", "opcode", "words"),
    [
        (Kind.ALL_REDUCE, None, None),
        (Kind.ALL_REDUCE, "all-reduce", None),
        (Kind.PERMUTE, "collective-permute", None),
        (Kind.ALL_GATHER, "all-reduce", "all-reduce"),
        (Kind.REDUCE_SCATTER, "all-reduce-scatter", "all-reduce-scatter"),
    ],
)
def test_the_opcode_is_told_where_the_kind_does_not_say_it(
    kind: Kind, opcode: str | None, words: str | None
) -> None:
    assert opcode_words(replace(ROW, kind=kind, opcode=opcode)) == words


def test_a_file_of_this_package_is_named_from_the_package_on() -> None:
    ours = "/usr/lib/python3/site-packages/meshscope/programs/points.py:120"
    assert source_words(ours) == "meshscope/programs/points.py:120"
    assert source_words("/home/me/train.py:3") == "/home/me/train.py:3"


def test_signed_bytes() -> None:
    assert [signed_bytes(n) for n in (1500, 0, -1500)] == ["+1.5 kB", "0 B", "-1.5 kB"]


def verdict(left: list[Collective], right: list[Collective]) -> str:
    return verdict_words(compare(left, right), left="predicted", right="compiled")


def test_equal_tables_are_exact() -> None:
    assert verdict([ROW], [ROW]) == "predicted = compiled, exactly"


def test_a_costlier_opcode_is_equal_in_meaning_with_its_extra_bytes() -> None:
    """Twice the 3072 bytes that 2(n-1)/n of 2048 bytes are."""
    costly = replace(ROW, wire_bytes=6144, count=3)
    assert verdict([replace(ROW, count=3)], [costly]) == (
        "predicted = compiled in meaning, not in cost; "
        "prefill: 3 collectives costlier (+9.22 kB on the wire)"
    )


def test_every_difference_is_told_with_its_bytes(compiled_run: RunRecord) -> None:
    left, right = compiled_run.rows_of(Source.PREDICTED), compiled_run.rows_of(Source.COMPILED)
    assert verdict([*left], [*right]) == (
        "predicted and compiled differ; "
        "prefill: 3 collectives costlier (+4.61 kB on the wire), "
        "1 collective changed (0 B on the wire), "
        "1 collective extra (16 B payload, 12 B on the wire); "
        "decode: 1 collective missing (2.05 kB payload, 1.54 kB on the wire)"
    )
