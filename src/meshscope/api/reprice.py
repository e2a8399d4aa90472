"""Replaces the modeled times of a run by those of a measured chip profile."""

from dataclasses import replace
from pathlib import Path

from meshscope.api.records import chip_profile
from meshscope.backends.compile.import_hlo import ImportedProgram, read_imported
from meshscope.backends.compile.read import Reading, read_chunks
from meshscope.cost.predicted import predicted_times, timed_predictions
from meshscope.errors import RunError
from meshscope.events.collective import Collective
from meshscope.events.enums import Source
from meshscope.events.step_time import StepTime
from meshscope.plans.experiment import experiment_of_record
from meshscope.plans.workload import parse_lengths
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.scope_rules import RULES, read_rules
from meshscope.store.run import RunRecord, SpeculativeRuns
from meshscope.store.write import HLO


def repriced(run: RunRecord, profile_path: Path) -> RunRecord:
    """The run with predicted and compiled times by this profile; its programs are read again."""
    if run.manifest.experiment.imported is not None:
        return _repriced_import(run, profile_path)
    experiment = experiment_of_record(run.manifest.experiment)
    profile = chip_profile(profile_path, experiment.topology.chip)
    rows: list[Collective] = timed_predictions(run.rows_of(Source.PREDICTED), experiment, profile)
    times: list[StepTime] = list(predicted_times(experiment, profile))
    hlo = run.path / HLO if run.path is not None and run.times_of(Source.COMPILED) else None
    layers = run.manifest.timed_layers
    for phase in experiment.phases if hlo is not None else ():
        assert hlo is not None
        read = read_chunks(experiment, phase, hlo, Reading(layers=layers, chip_profile=profile))
        rows += read.rows
        times.append(read.time)
    if hlo is None:
        rows += run.rows_of(Source.COMPILED)
    rows += run.rows_of(Source.MEASURED)
    return replace(
        run,
        rows=tuple(rows),
        times=tuple(times),
        speculative=_repriced_parts(run.speculative, profile_path),
    )


def _repriced_parts(parts: SpeculativeRuns | None, profile_path: Path) -> SpeculativeRuns | None:
    """The parts of speculative decoding by this profile."""
    if parts is None:
        return None
    repriced_ones = {name: repriced(part, profile_path) for name, part in parts.by_name.items()}
    return SpeculativeRuns(**repriced_ones)


def _repriced_import(run: RunRecord, profile_path: Path) -> RunRecord:
    """An imported run by this profile; HLO text without times stays without."""
    experiment = run.manifest.experiment
    topology = experiment.topology
    if run.path is None or topology is None or not experiment.mesh:
        raise RunError("the imported run has no folder, slice or mesh. Import it again.")
    names = sorted(path.name for path in (run.path / HLO).iterdir())
    phases = experiment.program_phases or dict.fromkeys(names)
    programs = [
        ImportedProgram(
            module=read_hlo(run.path / HLO / name, is_partial=True),
            phase=phase,
            default_phase=experiment.phase,
        )
        for name, phase in phases.items()
    ]
    rules = run.path / RULES
    read = read_imported(
        programs,
        topology=topology,
        mesh=experiment.device_mesh,
        rules=[read_rules(rules)] if rules.exists() else [],
        n_layers=experiment.extended_layers,
        lengths={} if experiment.lengths is None else parse_lengths(experiment.lengths),
        chip_profile=chip_profile(profile_path, topology.chip),
    )
    return replace(run, rows=tuple(read.rows), times=read.times)
