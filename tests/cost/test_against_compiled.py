"""The closed form against the steps that were compiled and are kept in benchmarks/closed_form.csv."""

import csv
import sys
from pathlib import Path
from statistics import median

import pytest

from meshscope.cost.predicted import predicted_times
from meshscope.spec.experiment import Experiment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def compiled() -> list[tuple[dict[str, str], Experiment]]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from closed_form_grid import experiments  # noqa: PLC0415  lies beside the CSV

        by_name = dict(experiments())
    finally:
        sys.path.remove(str(BENCHMARKS))
    with (BENCHMARKS / "closed_form.csv").open() as file:
        return [(row, by_name[row["experiment"]]) for row in csv.DictReader(file)]


def test_most_steps_that_were_not_fitted_lie_within_a_fifth(compiled):
    errors: dict[str, list[float]] = {"prefill": [], "decode": []}
    for row, experiment in compiled:
        if row["half"] == "judging":
            times = {time.phase.value: time for time in predicted_times(experiment)}
            ours_s = times[row["phase"]].step.value_s
            errors[row["phase"]].append(abs(ours_s / float(row["compiled_s"]) - 1))
    for phase, own in errors.items():
        assert median(own) < 0.15, phase
        assert sum(error < 0.2 for error in own) >= 0.8 * len(own), phase


def test_intervals_hold_what_was_compiled(compiled):
    """Nine in ten, for the factors are those within which nine in ten of the judging steps lie."""
    inside = 0
    for row, experiment in compiled:
        times = {time.phase.value: time for time in predicted_times(experiment)}
        step = times[row["phase"]].step
        inside += step.lower_s <= float(row["compiled_s"]) <= step.upper_s
    assert inside >= 0.9 * len(compiled)


def test_communication_that_is_exposed_is_that_of_the_compiled_schedule(compiled):
    """By the same model of the wires on both sides: what is compared is counts, kinds and overlap."""
    ratios = []
    for row, experiment in compiled:
        compiled_s = float(row["compiled_exposed_s"])
        times = {time.phase.value: time for time in predicted_times(experiment)}
        if compiled_s > 1e-5:
            ratios.append(times[row["phase"]].exposed_s / compiled_s)
    assert sum(abs(ratio - 1) < 0.01 for ratio in ratios) > 0.6 * len(ratios)
    assert median(ratios) == pytest.approx(1, abs=1e-3)
