"""Phrases about collectives and comparisons."""

from dataclasses import replace

from made import collective
from tables import table

from meshscope.analysis.join import compare
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Source
from meshscope.reports.words import (
    array_text,
    group_text,
    short_source_line,
    unusual_opcode,
    verdict_sentence,
)
from meshscope.store.run import RunRecord

ROW = collective(Kind.ALL_REDUCE, (2, 8, 64), groups=((0, 1, 2, 3), (4, 5, 6, 7)))


def test_groups_show_number_and_size_and_mark_slices() -> None:
    permute = replace(ROW, kind=Kind.PERMUTE, groups=((0, 1), (1, 0), (2, 3)))
    rows = [ROW, replace(ROW, crosses_slices=False), replace(ROW, crosses_slices=True), permute]
    assert [group_text(row) for row in rows] == ["2 x 4", "2 x 4", "2 x 4 DCN", "3 pairs"]


def test_unknown_types_and_shapes_are_question_marks() -> None:
    rows = [ROW, replace(ROW, shape=()), replace(ROW, shape=None), replace(ROW, dtype=None)]
    assert [array_text(row) for row in rows] == ["bf16[2,8,64]", "bf16[]", "bf16[?]", "?[2,8,64]"]


@table
def test_only_unusual_opcodes_are_shown(kind: Kind, opcode: str | None, words: str | None) -> None:
    assert unusual_opcode(replace(ROW, kind=kind, opcode=opcode)) == words


def test_source_lines_start_at_this_package_or_in_the_working_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = ("/usr/lib/meshscope/programs/points.py", "/elsewhere/a.py", tmp_path / "a.py")
    short = [short_source_line(f"{path}:3") for path in paths]
    assert short == ["meshscope/programs/points.py:3", "/elsewhere/a.py:3", "a.py:3"]


def verdict(left: list[Collective], right: list[Collective]) -> str:
    return verdict_sentence(compare(left, right), left="predicted", right="compiled")


def test_an_opcode_with_more_bytes_is_equal_in_meaning() -> None:
    """6144 bytes are twice 2(n-1)/n of 2048 bytes with n = 4."""
    costly = replace(ROW, wire_bytes=6144, count=3)
    assert verdict([replace(ROW, count=3)], [costly]) == (
        "collectives: predicted = compiled in meaning, but not in bytes; "
        "prefill: 3 with more bytes (+9.22 kB on the wire)"
    )


def test_every_difference_is_listed_with_its_bytes(compiled_run: RunRecord) -> None:
    left, right = compiled_run.rows_of(Source.PREDICTED), compiled_run.rows_of(Source.COMPILED)
    assert verdict([*left], [*right]) == (
        "collectives: predicted and compiled differ; "
        "prefill: 3 with more bytes (+4.61 kB on the wire), "
        "1 changed (0 B on the wire), "
        "1 extra (16 B payload, 12 B on the wire); "
        "decode: 1 missing (2.05 kB payload, 1.54 kB on the wire)"
    )
