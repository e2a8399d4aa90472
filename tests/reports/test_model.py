"""The view model: one text for each value, and tables without empty or constant columns."""

import unicodedata
from dataclasses import replace

import polars as pl
from made import collective
from tables import table

from meshscope.analysis.comparison import compare_sources
from meshscope.analysis.insertion import insertions
from meshscope.analysis.join import Verdict, compare
from meshscope.events.collective import Collective, Resharding
from meshscope.events.enums import Kind, Source
from meshscope.reports.collectives import insertion_lines
from meshscope.reports.metrics import prefill_first, table_of_frame
from meshscope.reports.model import (
    EMPTY_LABEL,
    UNKNOWN_LABEL,
    Figure,
    Unit,
    format_cell,
    joined,
    label_of,
    plain,
    short,
    unit_of,
)
from meshscope.reports.words import (
    array_text,
    group_text,
    short_source_line,
    unusual_opcode,
    verdict_sentence,
)
from meshscope.store.run import RunRecord


@table
def test_a_cell_is_written_in_its_unit(value, unit: Unit, text: str) -> None:
    assert format_cell(value, unit) == text


def test_a_figure_writes_its_share_and_its_range() -> None:
    assert format_cell(None, Unit.SECONDS) == EMPTY_LABEL
    assert format_cell(Figure(value=None, unit=Unit.SECONDS), Unit.TEXT) == UNKNOWN_LABEL
    share = Figure(value=0.05, unit=Unit.SECONDS, share_frac=0.25)
    assert format_cell(share, Unit.TEXT) == "50 ms (25%)"
    figure = Figure(value=0.2, unit=Unit.SECONDS, low=0.1, high=0.4)
    assert figure.range_text == "100 to 400 ms"
    assert Figure(value=0.2, unit=Unit.SECONDS).range_text == UNKNOWN_LABEL


@table
def test_a_column_name_carries_its_unit(column: str, unit: Unit, label: str) -> None:
    assert (unit_of(column), label_of(column)) == (unit, label)


def test_a_frame_becomes_a_table_without_empty_and_constant_columns() -> None:
    frame = pl.DataFrame(
        {
            "source": ["compiled", "compiled"],
            "phase": ["decode", "prefill"],
            "layer": pl.Series([None, None], dtype=pl.Int64),
            "idle_s": [0.1, 0.2],
            "idle_frac": [0.5, 0.25],
            "unit": ["s", "s"],
            "max_gap": [1e-3, None],
        }
    )
    table = table_of_frame(frame, title="Idle")
    assert [(c.key, c.label) for c in table.columns] == [
        ("phase", "phase"),
        ("idle_s", "idle"),
        ("idle_frac", "idle share"),
        ("max_gap_s", "max gap"),
    ]
    assert table.rows == (("prefill", 0.2, 0.25, None), ("decode", 0.1, 0.5, 1e-3))
    assert table.shared == (("source", "compiled"),)


def test_words_are_joined() -> None:
    assert [joined(w) for w in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "", "a", "a and b", "a, b and c",
    ]  # fmt: skip


def test_rows_of_no_phase_keep_their_order() -> None:
    frame = pl.DataFrame({"phase": [None, None], "kind": ["b", "a"]})
    assert prefill_first(frame).rows() == frame.rows()
    empty = frame.clear()
    assert prefill_first(empty).rows() == []
    mixed = pl.DataFrame({"phase": ["decode", None, "prefill"]})
    assert prefill_first(mixed)["phase"].to_list() == ["prefill", "decode", None]


@table
def test_plain(text: object, escaped: str) -> None:
    assert plain(text) == escaped


def test_every_control_and_format_character_is_escaped() -> None:
    assert plain("\udcff") == "\\udcff"  # a byte that was not UTF-8
    text = plain("".join(map(chr, range(0x3000))))
    assert {unicodedata.category(c) for c in text} & {
        *("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"),
    } == set()


def test_a_long_name_is_cut_with_its_length() -> None:
    assert short("x" * 300) == "x" * 300
    assert short("\x1b" + "x" * 999_999, 5) == "\\x1bxxxx... [1,000,000 characters]"


ROW = collective(Kind.ALL_REDUCE, (2, 8, 64), groups=((0, 1, 2, 3), (4, 5, 6, 7)))


def test_groups_show_number_and_size_and_arrays_what_is_known() -> None:
    permute = replace(ROW, kind=Kind.PERMUTE, groups=((0, 1), (1, 0), (2, 3)))
    rows = [ROW, replace(ROW, crosses_slices=False), replace(ROW, crosses_slices=True), permute]
    assert [group_text(row) for row in rows] == ["2 x 4", "2 x 4", "2 x 4 DCN", "3 pairs"]
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


def test_an_opcode_with_more_bytes_is_equal_in_meaning_and_every_difference_listed(
    compiled_run: RunRecord,
) -> None:
    """6144 bytes are twice 2(n-1)/n of 2048 bytes with n = 4."""
    costly = replace(ROW, wire_bytes=6144, count=3)
    assert verdict([replace(ROW, count=3)], [costly]) == (
        "collectives: predicted = compiled in meaning, but not in bytes; "
        "prefill: 3 with more bytes (+9.22 kB on the wire)"
    )
    left, right = compiled_run.rows_of(Source.PREDICTED), compiled_run.rows_of(Source.COMPILED)
    assert verdict([*left], [*right]) == (
        "collectives: predicted and compiled differ; "
        "prefill: 3 with more bytes (+4.61 kB on the wire), "
        "1 changed (0 B on the wire), "
        "1 extra (16 B payload, 12 B on the wire); "
        "decode: 1 missing (2.05 kB payload, 1.54 kB on the wire)"
    )


def named(run: RunRecord, line: str | None = None) -> RunRecord:
    """The run whose compiled rows have names and, if given, this source line."""

    def of_row(number: int, row: Collective) -> Collective:
        if row.source is Source.PREDICTED:
            return row
        return replace(row, hlo_name=f"op.{number}", source_line=line or row.source_line)

    return replace(run, rows=tuple(of_row(i, row) for i, row in enumerate(run.rows)))


def moved(run: RunRecord) -> dict[str, Resharding]:
    """What every compiled row moves: a computed array."""
    facts = {"argument": None, "opcode": "dot", "dim": None, "is_unmerged": False}
    names = [row.hlo_name or "" for row in run.rows_of(Source.COMPILED)]
    return {name: Resharding(hlo_name=name, **facts) for name in names}


def test_collectives_that_the_plan_lacks_come_first_and_the_others_are_counted(compiled_run):
    run = named(compiled_run)
    comparison = compare_sources(run)
    n_equal = sum(m.count for m in comparison.matches if m.verdict is Verdict.EQUAL)

    explained = insertions(run.rows_of(Source.COMPILED), moved(run), comparison)
    lines = list(insertion_lines(explained))

    flags = [one.is_planned for one in explained]
    assert flags == sorted(flags, key=bool)
    assert 0 < sum(one.row.count for one in explained if one.is_planned) == n_equal
    n = sum(one.row.count for one in explained)
    assert lines[0] == (
        f"{n_equal} of the {n} collectives of the partitioner are in the plan; compare lists them"
    )
    assert lines[1] == f"the partitioner inserted {n - n_equal} collectives beyond the plan"
    assert " ".join(" ".join(lines).split()).count(" sent each") == flags.count(False)


def test_only_lines_of_the_user_are_named_and_have_remedies(compiled_run: RunRecord) -> None:
    """The lines of the rows are those of a program in `meshscope/programs`."""
    of_tool, of_user = named(compiled_run), named(compiled_run, "/home/me/train.py:7")
    assert {one.remedy for one in insertions(of_tool.rows, moved(of_tool))} == {None}
    assert any(one.remedy for one in insertions(of_user.rows, moved(of_user)))
    assert {one.is_planned for one in insertions(of_user.rows, moved(of_user))} == {None}
    fixed = insertions(of_user.rows, moved(of_user), is_of_user=False)  # lines of an engine
    assert {one.remedy for one in fixed} == {None}
    of_tool, of_user = named(compiled_run), named(compiled_run, "/home/me/train.py:7")
    text = "\n".join(insertion_lines(insertions(of_tool.rows, moved(of_tool))))
    assert "meshscope/programs" not in text
    assert " in attn of layer 0, " in text
    assert "train.py:7" in "\n".join(insertion_lines(insertions(of_user.rows, moved(of_user))))
