"""`meshscope compile`: the TPU compiler, no TPU."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from meshscope.backends.compile.compile import check_can_compile, compile_experiment
from meshscope.backends.compile.cycles import Cycles
from meshscope.cli.keeping import keep
from meshscope.cli.making import predicted_run, run_of
from meshscope.cli.options import (
    ExperimentOptions,
    asked_experiment,
    run_folder,
    takes_options,
)
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.cli.profiles import asked_profile
from meshscope.cli.progress import CompileProgress
from meshscope.cli.tracing import tell_python
from meshscope.cost.timeline import write_timeline
from meshscope.errors import SpecError
from meshscope.spec.experiment import Experiment
from meshscope.spec.program import Engine
from meshscope.store.folder import new_folder
from meshscope.store.history import earlier_compile
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO
from meshscope.views.document import run_document
from meshscope.views.plain import plain
from meshscope.views.text import run_text


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions(ExperimentOptions):
    """What the user asks for, as typed."""

    cycles: Annotated[
        Cycles,
        typer.Option(
            help="Time by the compiler's estimates, or by its slow profile of its own bundles."
        ),
    ] = Cycles.ESTIMATED


def _command(options: CompileOptions) -> None:
    """Compile for chips that are not there, into a run.

    Prefill and decode compile side by side; the table puts predicted beside compiled.
    """
    run = _compiled_run(options)
    if options.as_json:
        print_json(run_document(run))
        return
    console = new_console()
    print_all(console, run_text(run, console))


command = takes_options(_command, CompileOptions)


def checked(options: ExperimentOptions) -> Experiment:
    """The experiment, where the compiler can take it."""
    if options.engine is not Engine.MESHSCOPE:
        raise SpecError(
            f"--engine {options.engine} has no program to compile. Use predict --engine {options.engine}."
        )
    experiment = asked_experiment(options)
    check_can_compile(experiment)
    return experiment


def _compiled_run(options: CompileOptions) -> RunRecord:
    experiment = checked(options)
    tell_python(experiment)
    path = run_folder(experiment, options.out)
    profile = asked_profile(options.profile, experiment.topology.chip)
    predicted = predicted_run(experiment, profile)
    with new_folder(path, force=options.force) as partial:
        (partial / HLO).mkdir()
        with _progress(experiment, path) as progress:
            result = compile_experiment(
                experiment,
                partial / HLO,
                progress=progress,
                cycles=options.cycles,
                chip_profile=profile,
            )
        run = run_of(experiment, predicted, result, times=[step.time for step in result.steps])
        write_timeline(partial, result.steps)
        keep(run, partial)
    return replace(run, path=path)


def _progress(experiment: Experiment, path: Path) -> CompileProgress:
    """Says how long each phase will take, where a run beside this one compiled the same model."""
    earlier = earlier_compile(experiment.record, path.parent)
    if earlier is None:
        return CompileProgress()
    expected_s = {phase.value: seconds for phase, seconds in earlier.phase_s.items()}
    return CompileProgress(expected_s, told_by=plain(earlier.name))
