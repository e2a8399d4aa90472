"""Fits of known lines, and rejected inputs."""

import numpy as np
import pytest
from tables import table

from meshscope.analysis.samples import fit_line, spread_of
from meshscope.errors import SpecError

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
