"""Faults planted in small programs: the table of docs/lint.md follows from the stored outcomes, and these can be repeated."""

import csv
from collections import Counter
from pathlib import Path

import pytest
from planted import Case, outcomes, reported

from meshscope.events.enums import Phase

DOCS = Path(__file__).parents[2] / "docs"
with (DOCS / "evidence/lint_mutants.csv").open() as file:
    ROWS = list(csv.DictReader(file))
REPEATED = (("cohere2", "tp=8,sp"), ("dots1", "dp=2,cp=2,tp=2"))
KINDS = {
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "all-to-all": "all-to-all, permute",
    "collective-permute": "all-to-all, permute",
}


def test_the_page_has_the_share_of_faults_that_are_reported() -> None:
    counts = {kind: Counter[str]() for kind in KINDS.values()}
    for row in ROWS:
        if row["changes_result"] == "True":
            counts[KINDS[row["collective"]]][row["reported"]] += 1
    expected = [
        f"| {kind} | {c.total()} | {c['certain']} | {c['possible']} | {c['no']} |"
        for kind, c in counts.items()
    ]
    page = (DOCS / "lint.md").read_text()
    assert [line for line in expected if line not in page] == []
    every = sum(counts.values(), Counter[str]())
    share = 1 - every["no"] / every.total()
    assert f"{share:.1%} of the faults".replace("%", " %", 1) in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case(config, plan, Phase.PREFILL) for config, plan in REPEATED],
    ids="-".join,
)
def test_stored_outcomes_can_be_repeated(case: Case) -> None:
    stored = {
        (row["name"], row["change"]): (row["changes_result"] == "True", row["reported"])
        for row in ROWS
        if (row["config"], row["plan"], row["phase"]) == case[:3] and row["loop"] == case.loop
    }
    (_, _, whole, mesh), *faults = outcomes(case)
    assert reported(whole, mesh) == "no"
    assert {
        (mutant.name, mutant.change): (changes, reported(text, mesh))
        for mutant, changes, text, mesh in faults
        if mutant is not None
    } == stored
