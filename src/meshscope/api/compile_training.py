"""Compiles a training step of MaxText for a slice."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshscope.api.idle_options import idle_option
from meshscope.api.options import changed_options
from meshscope.api.progress import ReportedProgress
from meshscope.api.records import chip_profile, new_manifest, write_record
from meshscope.api.request import CompileRequest, command_line, run_folder
from meshscope.api.run import Run
from meshscope.backends.compile.compile import compile_step_program
from meshscope.backends.compile.function import FunctionResult, function_memory
from meshscope.cost.steps import timed_step
from meshscope.cost.timeline import write_timeline
from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import Phase, Source
from meshscope.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.plans.experiment_record import ExperimentRecord, NamedModel
from meshscope.programs.engines.engine_config import MAXTEXT_AXES, maxtext_model
from meshscope.programs.engines.limits import check_slice
from meshscope.programs.environments import installed_release
from meshscope.programs.frontends import program_file
from meshscope.readers.hlo.collectives import module_collectives, rows_of
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.scopes import with_scopes
from meshscope.store.folder import new_folder
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO

# Options that a training step does not have.
_OF_INFERENCE = ("output", "weight_dtype", "cache_dtype", "prefill_chunk")
_FUNCTION = "maxtext/trainers/pre_train/train.py"  # its train_step


def compile_training_request(request: CompileRequest, experiment: Experiment) -> Run:
    """The run of the training step: the batch is the global one, and the prompt a sequence's length."""
    changed = changed_options(request)
    for name in _OF_INFERENCE:
        if name in changed:
            raise idle_option(name, changed[name], "a training step has none")
    check_can_compile_training(experiment)
    path = run_folder(request, experiment)
    profile = chip_profile(request.profile, experiment.topology.chip)
    with new_folder(path, force=request.force) as partial:
        (partial / HLO).mkdir()
        report = ReportedProgress(request.progress)
        compiled = compile_step_program(experiment, partial / HLO, progress=report)
        report(Phase.STEP, "reading")
        result = read_training(experiment, partial / HLO, compiled, chip_profile=profile)
        record = _record(request, experiment, result, compiled)
        write_timeline(partial, [result.step])
        write_record(record, partial)
    return Run(record=replace(record, path=path))


def check_can_compile_training(experiment: Experiment) -> None:
    """Raises an error if no training step can be compiled here for the experiment."""
    program, plan = experiment.program, experiment.plan
    if not program.frontend.is_trained:
        raise SpecError(
            f"--training compiles the training step of MaxText, not of --frontend {program.frontend}. "
            f"Use --frontend maxtext, or meshscope.compile(train_step, ...) for your own."
        )
    check_slice(experiment)
    maxtext_model(experiment.model)
    used = [axis for axis in ("pp", "cp", "ep") if getattr(plan, axis) > 1]
    used += ["sp"] if plan.sp else []
    if used:
        raise PlanError(
            f"plan '{plan}': --training takes {', '.join(MAXTEXT_AXES)}, not {used[0]}. Use fsdp={plan.n_devices}."
        )
    installed_release(program.frontend, program.engine_version)


def read_training(
    experiment: Experiment,
    hlo_dir: Path,
    report: dict[str, Any],
    *,
    chip_profile: ChipProfile | None = None,
) -> FunctionResult:
    """The rows, memory and time of a compiled step; rows have parts and no layers."""
    module = with_scopes(read_hlo(hlo_dir / program_file(Phase.STEP)))
    collectives = module_collectives(
        module,
        mesh=replace(experiment.plan.mesh, order=tuple(report["order"])),
        crosses_slices=experiment.crosses_slices,
    )
    rows = rows_of(
        collectives,
        n_steps_of={},
        crosses_slices=experiment.crosses_slices,
        default_phase=Phase.STEP,
    )
    step = timed_step(
        module,
        collectives,
        phase=Phase.STEP,
        topology=experiment.topology,
        chip_profile=chip_profile,
    )
    return FunctionResult(
        rows=tuple(step.rows(rows)),
        memory=function_memory(report["memory"], experiment.topology),
        step=step,
    )


def _record(
    request: CompileRequest,
    experiment: Experiment,
    result: FunctionResult,
    report: Mapping[str, Any],
) -> RunRecord:
    model, workload = experiment.model, experiment.workload
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
    manifest = new_manifest(
        Source.COMPILED,
        description,
        command_line("compile", request),
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
