"""Facts about the compiler, and fits of constants."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fit_collectives import fit_constants
from tables import table

from meshscope.analysis.samples import fit_line, spread_of
from meshscope.errors import SpecError
from meshscope.hardware.chips import CHIPS, Chip, ChipKind
from meshscope.hardware.compiler_facts import (
    COMPILER_FACTS,
    FITTED_CONSTANTS,
    OPERATION_FACTS,
    fitted_constants,
    read_facts,
)
from meshscope.hardware.interconnect.constants import constants_of
from meshscope.serialize import to_plain

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


# Chips with published wires.
KNOWN = [chip for chip in CHIPS.values() if chip.link_bytes_per_s]


@pytest.mark.parametrize("chip", KNOWN, ids=lambda chip: chip.name)
def test_stored_constants_equal_the_fit(chip: Chip) -> None:
    stored, fitted = (_figures(to_plain(of(chip))) for of in (constants_of, fit_constants))
    for ours, new in zip(stored, fitted, strict=True):
        assert ours == (pytest.approx(new, rel=1e-9) if isinstance(new, float) else new)


def _figures(plain: Any) -> Iterator[Any]:
    """The numbers and texts of nested records, in order."""
    if not isinstance(plain, dict | list):
        yield plain
        return
    for value in plain.values() if isinstance(plain, dict) else plain:
        yield from _figures(value)


def test_a_new_chip_is_refused_until_its_constants_are_fitted() -> None:
    with pytest.raises(SpecError, match=r"v9 are fitted\. Run 'make constants'"):
        constants_of(replace(CHIPS["v6e"], name="v9"))


WORK = [0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2]


def test_an_exact_line_is_recovered() -> None:
    fit = fit_line(WORK, [8e-6 + 1.25 * w for w in WORK], name="x")
    assert (fit.latency_s, fit.inverse_bandwidth) == pytest.approx((8e-6, 1.25))
    assert fit.log_errors == pytest.approx([0.0] * 6, abs=1e-9)


def test_an_outlier_has_little_weight() -> None:
    seconds = [8e-6 + 1.25 * w for w in WORK]
    seconds[4] *= 5
    fit = fit_line(WORK, seconds, name="x")
    assert (fit.latency_s, fit.inverse_bandwidth) == pytest.approx((8e-6, 1.25), rel=0.05)


@table
def test_impossible_lines_are_rejected(work: list[float], seconds: list[float], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        fit_line(work, seconds, name="all_reduce")


def test_spreads_cover_nine_of_ten_new_errors() -> None:
    """Coverage of split conformal prediction over many draws of a heavy-tailed distribution."""
    rng = np.random.default_rng(0)
    is_covered = [
        np.exp(abs(new)) <= spread_of(errors.tolist())
        for errors, new in ((rng.standard_t(2, 19), rng.standard_t(2)) for _ in range(4000))
    ]
    assert 0.88 <= np.mean(is_covered) <= 0.93


def test_an_interval_needs_holdout_points() -> None:
    with pytest.raises(SpecError, match="no holdout points"):
        spread_of([])
