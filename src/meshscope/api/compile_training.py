"""Compiles a training step of MaxText for a slice."""

from dataclasses import replace
from pathlib import Path

from meshscope.api.idle_options import idle_option
from meshscope.api.progress import ReportedProgress
from meshscope.api.records import chip_profile, new_manifest, write_record
from meshscope.api.request import CompileRequest, changed_options, command_line, run_folder
from meshscope.api.run import Run
from meshscope.backends.compile.training import (
    CompiledTraining,
    check_can_compile_training,
    compile_training,
)
from meshscope.cost.timeline import write_timeline
from meshscope.events.enums import Phase, Source
from meshscope.plans.experiment import Experiment
from meshscope.plans.experiment_record import ExperimentRecord, NamedModel
from meshscope.store.folder import new_folder
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO
from meshscope.workers import Progress

# Options that a training step does not have.
_OF_INFERENCE = ("output", "weight_dtype", "cache_dtype", "prefill_chunk")
_FUNCTION = "maxtext/trainers/pre_train/train.py"  # its train_step


def compile_training_request(
    request: CompileRequest,
    experiment: Experiment,
    *,
    out: Path | None,
    force: bool,
    progress: Progress | None,
) -> Run:
    """The run of the training step: the batch is the global one, and the prompt a sequence's length."""
    changed = changed_options(request)
    for name in _OF_INFERENCE:
        if name in changed:
            raise idle_option(name, changed[name], "a training step has none")
    check_can_compile_training(experiment)
    path = run_folder(request, experiment, out)
    profile = chip_profile(request.profile, experiment.topology.chip)
    with new_folder(path, force=force) as partial:
        (partial / HLO).mkdir()
        compiled = compile_training(
            experiment, partial / HLO, progress=ReportedProgress(progress), chip_profile=profile
        )
        record = _record(request, experiment, compiled, out)
        write_timeline(partial, [compiled.result.step])
        write_record(record, partial)
    return Run(record=replace(record, path=path))


def _record(
    request: CompileRequest, experiment: Experiment, compiled: CompiledTraining, out: Path | None
) -> RunRecord:
    model, workload, result = experiment.model, experiment.workload, compiled.result
    name = (
        f"training step of {model.name} ({model.n_layers} layers), {workload.batch} sequences of "
        f"{workload.prompt} tokens"
    )
    description = ExperimentRecord(
        model=NamedModel(name=name),
        function=_FUNCTION,
        mesh=dict(experiment.plan.mesh.axes),
        topology=experiment.topology,
        n_devices=experiment.topology.n_devices,
        n_chips=experiment.topology.n_chips,
        phase=Phase.STEP,
    )
    report = compiled.report
    manifest = new_manifest(
        Source.COMPILED,
        description,
        command_line("compile", request, out=out),
        phases=[Phase.STEP],
        versions=report["versions"],
        seconds={f"{Phase.STEP}.{step}": s for step, s in report["seconds"].items()},
        flags=report["flags"],
        others=result.step.others,
    )
    return RunRecord(
        path=None,
        manifest=manifest,
        rows=result.rows,
        memory={Source.COMPILED: result.memory},
        times=(result.step.time,),
    )
