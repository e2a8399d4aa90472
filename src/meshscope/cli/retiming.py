"""A run's times anew, by a chip profile; apart from the rest because it reads the programs again."""

from dataclasses import replace
from pathlib import Path

from meshscope.backends.compile.compile import read_phase
from meshscope.backends.compile.import_hlo import read_imported
from meshscope.cli.profiles import asked_profile
from meshscope.cost.predicted import predicted_times, timed_predictions
from meshscope.events.collective import Collective
from meshscope.events.enums import Source
from meshscope.events.step_time import StepTime
from meshscope.readers.hlo.parse import read_hlo
from meshscope.spec.experiment import experiment_of_record
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO


def retimed(run: RunRecord, profile_path: Path) -> RunRecord:
    """The run with predicted and compiled times by this profile."""
    if run.manifest.experiment.imported is not None:
        return _retimed_import(run, profile_path)
    experiment = experiment_of_record(run.manifest.experiment)
    profile = asked_profile(profile_path, experiment.topology.chip)
    rows: list[Collective] = timed_predictions(run.rows_of(Source.PREDICTED), experiment, profile)
    times: list[StepTime] = list(predicted_times(experiment, profile))
    has_programs = bool(run.times_of(Source.COMPILED)) and run.path is not None
    for phase in experiment.phases if has_programs else ():
        assert run.path is not None
        path = run.path / HLO / f"{phase}.hlo.txt.gz"
        own, step = read_phase(experiment, phase, path, chip_profile=profile)
        rows += own
        times.append(step.time)
    if not has_programs:
        rows += run.rows_of(Source.COMPILED)
    rows += run.rows_of(Source.MEASURED)
    return replace(run, rows=tuple(rows), times=tuple(times))


def _retimed_import(run: RunRecord, profile_path: Path) -> RunRecord:
    """An imported run by this profile; where the texts tell no times, they tell none now."""
    assert run.path is not None
    experiment = run.manifest.experiment
    topology, plan = experiment.topology, experiment.plan
    assert topology is not None
    assert plan is not None
    profile = asked_profile(profile_path, topology.chip)
    read = read_imported(
        [read_hlo(path, is_partial=True) for path in sorted((run.path / HLO).iterdir())],
        topology=topology,
        plan=plan,
        phase=experiment.phase,
        chip_profile=profile,
    )
    return replace(run, rows=tuple(read.rows), times=tuple(step.time for step in read.steps))
