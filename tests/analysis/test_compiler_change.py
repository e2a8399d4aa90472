"""What another compiler changes in memory and in how the same collectives run."""

from dataclasses import replace

import pytest

import meshscope
from meshscope.analysis.comparison import Side, explain
from meshscope.events.enums import Source
from meshscope.reports.explanation import sentences
from meshscope.store.run import RunRecord


def record(**versions: str) -> RunRecord:
    """A run that counts as compiled, by a compiler of these versions."""
    made = meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", layers=2).record
    rows = tuple(
        replace(row, source=Source.COMPILED, opcode="all-reduce", algorithm="Ring", is_async=False)
        for row in made.rows
    )
    return replace(
        made,
        rows=rows,
        memory={Source.COMPILED: made.memory[Source.PREDICTED]},
        manifest=replace(made.manifest, source=Source.COMPILED, versions=versions),
    )


def side(name: str, run: RunRecord) -> Side:
    return Side(name=name, run=run, source=Source.COMPILED)


OLD, NEW = record(jax="0.9.2", libtpu="0.0.37"), record(jax="0.10.2", libtpu="0.0.42.1")


def words(left: RunRecord, right: RunRecord) -> list[str]:
    return sentences(explain(side("A", left), side("B", right)))


def test_equal_programs_of_two_compilers_are_said_to_be_equal() -> None:
    *_, memory, forms = words(OLD, NEW)
    assert memory.endswith("on a device, the same in A and B.")
    assert forms.startswith("Collectives run alike")


def test_memory_and_algorithms_that_change_are_named() -> None:
    before = NEW.memory[Source.COMPILED]
    grown = replace(before, total_bytes=before.total_bytes + 3_000_000)
    rows = tuple(
        replace(row, algorithm="Pincer", is_async=True) if row.phase == "decode" else row
        for row in NEW.rows
    )
    *_, memory, decode = words(OLD, replace(NEW, rows=rows, memory={Source.COMPILED: grown}))
    assert "+3 MB" in memory
    assert decode.startswith("decode: ")
    assert "5 all-reduces over tp (asynchronous, Pincer)" in decode
    assert "in B run as 5 all-reduces over tp (Ring)" in decode


def test_only_another_compiler_is_compared_so() -> None:
    assert explain(side("A", OLD), side("B", OLD)).compiler is None
    predicted = meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8,sp", layers=2)
    plan = predicted.record.manifest.experiment
    other = replace(NEW, manifest=replace(NEW.manifest, experiment=plan))
    assert explain(side("A", OLD), side("B", other)).compiler is None


@pytest.mark.parametrize("n", [1, 3])
def test_a_form_counts_its_executions(n: int) -> None:
    rows = (replace(OLD.rows[0], count=n),)
    change = explain(side("A", replace(OLD, rows=rows)), side("B", replace(NEW, rows=()))).compiler
    (form,) = change.forms
    assert (form.left, form.right) == (n, 0)
