"""Compiles a training step of MaxText for a slice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from meshscope.api.compile_function import named_experiment, step_record
from meshscope.api.console import ReportedProgress
from meshscope.api.idle_options import idle_option
from meshscope.api.options import changed_options
from meshscope.api.records import chip_profile, write_record
from meshscope.api.request import CompileRequest, command_line, run_folder
from meshscope.api.run import Run
from meshscope.backends.compile.compile import compile_step_program
from meshscope.backends.compile.function import FunctionResult, function_memory
from meshscope.cost.steps import timed_step
from meshscope.cost.timeline import write_timeline
from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.engine_config import MAXTEXT_AXES, maxtext_model
from meshscope.programs.engines.limits import check_slice
from meshscope.programs.environments import installed_release
from meshscope.programs.frontends import program_file
from meshscope.readers.hlo.collectives import module_collectives, rows_of
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.scopes import with_scopes
from meshscope.store.folder import new_folder
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
        model, workload = experiment.model, experiment.workload
        name = (
            f"training step of {model.name} ({model.n_layers} layers), {workload.batch} sequences of "
            f"{workload.prompt} tokens"
        )
        record = step_record(
            named_experiment(
                name, _FUNCTION, dict(experiment.plan.mesh.axes), experiment.topology, Phase.STEP
            ),
            command_line("compile", request),
            result,
            compiled,
        )
        write_timeline(partial, [result.step])
        write_record(record, partial)
    return Run(record=record.placed(path))


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
    crosses_slices = experiment.crosses_slices
    mesh = replace(experiment.plan.mesh, order=tuple(report["order"]))
    collectives = module_collectives(module, mesh=mesh, crosses_slices=crosses_slices)
    rows = rows_of(
        collectives, n_steps_of={}, crosses_slices=crosses_slices, default_phase=Phase.STEP
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
