"""Several runs on a line each: those that fit first, then the faster ones."""

from dataclasses import replace

from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.spec.workload import Workload
from meshscope.store.run import RunRecord
from meshscope.views.ranking import is_same_work, ranked


def timed(run: RunRecord, seconds: float, *, fits: bool | None = None) -> RunRecord:
    step = StepTime(
        source=Source.PREDICTED,
        phase=Phase.PREFILL,
        step=TimeEstimate(value_s=seconds, low_s=None, high_s=None),
        compute_s=seconds,
        exposed_s=0.0,
        idle_s=0.0,
        bubble_s=0.0,
        collective_s=0.0,
        exposed_by_axis_s={},
        by_basis_s={},
        parts=(),
    )
    memory = replace(run.memory[Source.PREDICTED], fits=fits)
    times = (step, replace(step, phase=Phase.DECODE))
    return replace(run, times=times, memory={Source.PREDICTED: memory})


def names(runs: dict[str, RunRecord]) -> list[str]:
    return [entry.name for entry in ranked(runs)]


def test_a_run_that_does_not_fit_comes_last(predicted_run: RunRecord) -> None:
    runs = {
        "untimed": predicted_run,
        "too large": timed(predicted_run, 0.1, fits=False),
        "slow": timed(predicted_run, 2.0),
        "fast": timed(predicted_run, 1.0, fits=True),
    }
    assert names(runs) == ["fast", "slow", "untimed", "too large"]


def test_runs_of_different_work_are_ranked_by_tokens_per_second(predicted_run: RunRecord) -> None:
    """Eight sequences in two seconds are more than two in one."""
    experiment = replace(
        predicted_run.manifest.experiment, workload=Workload(batch=8, prompt=8, output=10)
    )
    manifest = replace(predicted_run.manifest, experiment=experiment)
    large = timed(replace(predicted_run, manifest=manifest), 2.0)
    assert names({"small": timed(predicted_run, 1.0), "large": large}) == ["large", "small"]


def test_runs_of_unknown_requests_are_not_taken_for_the_same_work(
    predicted_run: RunRecord,
) -> None:
    experiment = replace(predicted_run.manifest.experiment, workload=None)
    unknown = replace(
        predicted_run, manifest=replace(predicted_run.manifest, experiment=experiment)
    )
    assert not is_same_work(ranked({"one": unknown, "other": unknown}))
    assert is_same_work(ranked({"one": predicted_run, "other": predicted_run}))
