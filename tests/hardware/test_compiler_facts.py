"""Lookups of compiler facts and fitted constants by chip."""

from dataclasses import fields

import pytest

from meshscope.hardware.chips import CHIPS, ChipKind
from meshscope.hardware.compiler_facts import (
    FITTED_CONSTANTS,
    CompilerFacts,
    Fact,
    compiler_facts,
    fitted_constants,
    read_facts,
)

TPUS = [chip.name for chip in CHIPS.values() if chip.kind is ChipKind.TPU]


@pytest.mark.parametrize("chip", [*TPUS, "h100", ""])
def test_every_fact_has_a_source(chip: str) -> None:
    facts = compiler_facts(chip)
    values = [getattr(facts, field.name) for field in fields(CompilerFacts)]
    assert all(value.source for value in values if isinstance(value, Fact))


@pytest.mark.parametrize("chip", TPUS)
def test_every_tpu_has_facts_and_both_fits(chip: str) -> None:
    fit = fitted_constants(chip)
    assert fit.collectives is not None
    assert 0 < fit.closed_form["constants"]["matmul"] <= 1
    assert fit.closed_form["spreads"].keys() == fit.closed_form["constants"].keys()


def test_every_fit_has_a_source() -> None:
    for fits in read_facts(FITTED_CONSTANTS)["libtpu"].values():
        assert fits["collectives"]["source"]
        assert fits["closed_form"]["source"]
