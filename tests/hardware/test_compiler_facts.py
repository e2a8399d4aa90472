"""Lookups of compiler facts and fitted constants by chip."""

import pytest

from meshscope.hardware.chips import CHIPS, ChipKind
from meshscope.hardware.compiler_facts import (
    COMPILER_FACTS,
    FITTED_CONSTANTS,
    OPERATION_FACTS,
    fitted_constants,
    read_facts,
)

TPUS = [chip.name for chip in CHIPS.values() if chip.kind is ChipKind.TPU]


def test_every_fact_and_fit_has_a_source() -> None:
    for facts in read_facts(COMPILER_FACTS)["libtpu"].values():
        assert all(fact["source"] for by_chip in facts.values() for fact in by_chip.values())
    for fits in read_facts(FITTED_CONSTANTS)["libtpu"].values():
        assert fits["collectives"]["source"]
        assert fits["closed_form"]["source"]
    assert all(fact["source"] for fact in read_facts(OPERATION_FACTS).values())


@pytest.mark.parametrize("chip", TPUS)
def test_every_tpu_has_facts_and_both_fits(chip: str) -> None:
    fit = fitted_constants(chip)
    assert fit["collectives"]
    assert 0 < fit["closed_form"]["constants"]["matmul"] <= 1
    assert fit["closed_form"]["spreads"].keys() == fit["closed_form"]["constants"].keys()
