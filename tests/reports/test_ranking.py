"""Several runs on a line each: those that fit first, then the faster ones."""

from dataclasses import replace
from typing import NamedTuple

import pytest
from made import estimate, step_time

from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import Activity, ActivityTime
from meshscope.plans.workload import Workload
from meshscope.reports.ranking import ranked
from meshscope.store.run import RunRecord

MATMUL, EXPOSED = Activity.MATMUL, Activity.EXPOSED


def timed(run: RunRecord, seconds: float, *, fits: bool | None = None) -> RunRecord:
    step = step_time(Phase.PREFILL, estimate(seconds), seconds, source=Source.PREDICTED)
    memory = replace(run.memory[Source.PREDICTED], fits=fits)
    times = (step, replace(step, phase=Phase.DECODE))
    return replace(run, times=times, memory={Source.PREDICTED: memory})


def names(runs: dict[str, RunRecord]) -> list[str]:
    return [entry.name for ranking in ranked(runs) for entry in ranking.runs]


def test_a_run_that_does_not_fit_comes_last(predicted_run: RunRecord) -> None:
    runs = {
        "untimed": predicted_run,
        "too large": timed(predicted_run, 0.1, fits=False),
        "slow": timed(predicted_run, 2.0),
        "fast": timed(predicted_run, 1.0, fits=True),
    }
    assert names(runs) == ["fast", "slow", "untimed", "too large"]


def other_batch(run: RunRecord, batch: int) -> RunRecord:
    experiment = replace(
        run.manifest.experiment, workload=Workload(batch=batch, prompt=8, output=10)
    )
    return replace(run, manifest=replace(run.manifest, experiment=experiment))


def test_runs_of_different_work_are_grouped(predicted_run: RunRecord) -> None:
    """No run is ranked against one of another batch, whose request is shorter."""
    large = other_batch(predicted_run, 8)
    runs = {
        "short": timed(other_batch(predicted_run, 1), 0.1),
        "slow": timed(large, 2.0),
        "fast": timed(large, 1.0),
    }
    shared, others = ranked(runs)
    assert shared.sentence == "fast serves the request fastest: 10 s"
    assert [[run.name for run in group.runs] for group in (shared, others)] == [
        ["fast", "slow"],
        ["short"],
    ]
    assert (others.work, others.ranked) == (None, ())


class Pair(NamedTuple):
    case: str
    left: dict[Activity, float]
    right: dict[Activity, float]
    spread: float | None  # of the interval to each side
    is_equal: bool


PAIRS = (
    Pair(
        "hidden by what differs",
        {MATMUL: 1.0, EXPOSED: 0.5},
        {MATMUL: 1.4, EXPOSED: 0.2},
        0.2,
        True,
    ),
    Pair("less of the same", {MATMUL: 1.0, EXPOSED: 0.5}, {MATMUL: 0.85, EXPOSED: 0.5}, 0.2, False),
    Pair("not resolved", {MATMUL: 1.0}, {MATMUL: 1.02}, 0.2, True),
    Pair("narrow intervals", {MATMUL: 1.0}, {MATMUL: 1.02}, 0.005, False),
    Pair("no intervals, apart", {MATMUL: 1.0}, {MATMUL: 1.02}, None, False),
    Pair("no intervals, same", {MATMUL: 1.0}, {MATMUL: 1.004}, None, True),
    Pair("unknown activities", {}, {}, 0.2, True),
)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.case)
def test_runs_are_equal_within_the_errors_that_they_do_not_share(pair, predicted_run) -> None:
    def run(activities: dict[Activity, float], default_s: float) -> RunRecord:
        seconds, spread = sum(activities.values()) or default_s, pair.spread
        low_s, high_s = (
            (None, None) if spread is None else (seconds / (1 + spread), seconds * (1 + spread))
        )
        base = timed(predicted_run, seconds)
        step = replace(
            base.times[0],
            step=estimate(seconds, low_s, high_s),
            activities=tuple(
                ActivityTime(activity=a, seconds=s, hbm_busy_s=0.0) for a, s in activities.items()
            ),
        )
        return replace(base, times=(step, replace(step, phase=Phase.DECODE)))

    runs = {"left": run(pair.left, 1.0), "right": run(pair.right, 1.15)}
    (ranking,) = ranked(runs)
    assert (len(ranking.best) == 2) == pair.is_equal
    assert (" are equal: " in ranking.sentence) == pair.is_equal


def test_equal_runs_share_their_unit(predicted_run: RunRecord) -> None:
    one, other = (timed(predicted_run, seconds) for seconds in (0.2, 0.2008))
    (ranking,) = ranked({"tp=8,sp": one, "tp=8": other})
    assert ranking.sentence == "tp=8,sp and tp=8 are equal: 2 and 2.01 s"


def test_runs_of_unknown_requests_are_not_taken_for_the_same_work(predicted_run) -> None:
    experiment = replace(predicted_run.manifest.experiment, workload=None)
    unknown = replace(
        predicted_run, manifest=replace(predicted_run.manifest, experiment=experiment)
    )
    assert [group.work for group in ranked({"one": unknown, "other": unknown})] == [None]
    (group,) = ranked({"one": predicted_run, "other": predicted_run})
    assert group.work is not None
