"""The closed form, evaluated now, against the compiled times in benchmarks/closed_form.csv.

docs/time.md claims medians of 3 to 4 % and at least 92 of 100 steps within 15 %.
"""

import csv
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from meshscope.cost.predicted import predicted_times
from meshscope.events.step_time import StepTime

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Pair(NamedTuple):
    """A compiled step of the grid, and its prediction."""

    half: str
    phase: str
    compiled_s: float
    compiled_exposed_s: float
    predicted: StepTime

    @property
    def error(self) -> float:
        return abs(self.predicted.step.value_s / self.compiled_s - 1)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from closed_form_grid import experiments  # noqa: PLC0415  beside the CSV file

        by_name = dict(experiments())
    finally:
        sys.path.remove(str(BENCHMARKS))
    times = {
        (name, time.phase.value): time
        for name, experiment in by_name.items()
        for time in predicted_times(experiment)
    }
    with (BENCHMARKS / "closed_form.csv").open() as file:
        return [
            Pair(
                half=row["half"],
                phase=row["phase"],
                compiled_s=float(row["compiled_s"]),
                compiled_exposed_s=float(row["compiled_exposed_s"]),
                predicted=times[row["experiment"], row["phase"]],
            )
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize("half", ["fitted", "holdout"])
@pytest.mark.parametrize(("phase", "median_error"), [("prefill", 0.042), ("decode", 0.033)])
def test_errors_are_those_in_the_documentation(
    pairs: list[Pair], half: str, phase: str, median_error: float
) -> None:
    errors = [pair.error for pair in pairs if (pair.half, pair.phase) == (half, phase)]
    assert len(errors) == 100
    assert median(errors) < median_error
    assert sum(error <= 0.15 for error in errors) >= 92
    assert max(errors) < (0.47 if phase == "prefill" else 0.20)


def test_intervals_contain_the_compiled_times(pairs: list[Pair]) -> None:
    """Nine in ten: the factors cover 90 % of the holdout errors."""
    is_inside = [
        pair.predicted.step.lower_s <= pair.compiled_s <= pair.predicted.step.upper_s
        for pair in pairs
    ]
    assert sum(is_inside) >= 0.9 * len(pairs)


def test_exposed_communication_equals_that_of_the_compiled_schedule(pairs: list[Pair]) -> None:
    """Both sides use one interconnect model: this compares counts, kinds and overlap."""
    ratios = [
        pair.predicted.exposed_s / pair.compiled_exposed_s
        for pair in pairs
        if pair.compiled_exposed_s > 1e-5
    ]
    assert sum(abs(ratio - 1) < 0.01 for ratio in ratios) > 0.6 * len(ratios)
    assert median(ratios) == pytest.approx(1, abs=1e-3)
