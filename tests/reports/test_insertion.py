"""Which collectives of the partitioner are shown: those that the plan lacks, with remedies for the user's lines."""

from dataclasses import replace

from meshscope.analysis.comparison import compare_sources
from meshscope.analysis.insertion import insertions
from meshscope.analysis.join import Verdict
from meshscope.events.collective import Collective, Resharding
from meshscope.events.enums import Source
from meshscope.reports.collectives import insertion_lines
from meshscope.store.run import RunRecord


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
        f"{n_equal} of the {n} collectives of the partitioner are those of the plan; compare lists them"
    )
    assert lines[1] == f"the partitioner inserted {n - n_equal} collectives beyond the plan"
    assert sum("sent each" in line for line in lines) == flags.count(False)


def test_only_lines_of_the_user_have_remedies(compiled_run: RunRecord) -> None:
    """The lines of the rows are those of a program in `meshscope/programs`."""
    of_tool, of_user = named(compiled_run), named(compiled_run, "/home/me/train.py:7")
    assert {one.remedy for one in insertions(of_tool.rows, moved(of_tool))} == {None}
    assert any(one.remedy for one in insertions(of_user.rows, moved(of_user)))
    assert {one.is_planned for one in insertions(of_user.rows, moved(of_user))} == {None}
