"""Compiles a training step of MaxText, and reads its collectives and its time."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshscope.backends.compile.compile import Progress, compile_step_program
from meshscope.backends.compile.files import program_file
from meshscope.backends.compile.function import FunctionResult, function_memory
from meshscope.cost.steps import timed_step
from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import Phase
from meshscope.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.limits import check_slice
from meshscope.programs.engines.maxtext_models import AXES, maxtext_model
from meshscope.programs.environments import installed_release
from meshscope.readers.hlo.collectives import module_collectives, rows_of
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.scopes import with_scopes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledTraining:
    """A compiled training step, and the report of its worker."""

    result: FunctionResult
    report: dict[str, Any]


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
            f"plan '{plan}': --training takes {', '.join(AXES)}, not {used[0]}. Use fsdp={plan.n_devices}."
        )
    installed_release(program.frontend, program.engine_version)


def compile_training(
    experiment: Experiment,
    hlo_dir: Path,
    *,
    progress: Progress,
    chip_profile: ChipProfile | None = None,
) -> CompiledTraining:
    """Compiles the step, writes its HLO text and report to `hlo_dir`, and reads them."""
    report = compile_step_program(experiment, hlo_dir, progress=progress)
    progress(Phase.STEP, "reading")
    result = read_training(experiment, hlo_dir, report, chip_profile=chip_profile)
    return CompiledTraining(result=result, report=report)


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
