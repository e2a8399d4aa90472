"""`meshscope compile`: the TPU compiler, no TPU."""

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from meshscope.cli.making import new_manifest, predicted_run
from meshscope.cli.options import (
    ExperimentOptions,
    asked_experiment,
    run_folder,
    takes_options,
)
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.cli.profiles import asked_profile
from meshscope.cli.progress import Progress
from meshscope.compile.compile import compile_experiment
from meshscope.compile.cycles import Cycles
from meshscope.errors import SpecError
from meshscope.plan.experiment import Engine
from meshscope.report.document import metrics_document, run_document
from meshscope.report.text import run_text
from meshscope.rundir.folder import new_folder
from meshscope.rundir.run import Run
from meshscope.rundir.write import HLO, write_run
from meshscope.table.kinds import Source
from meshscope.timing.timeline import write_timeline


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
    """Compile with the TPU compiler, without a TPU, into a run.

    Prefill and decode compile side by side; the table puts predicted beside compiled.
    """
    run = _compiled_run(options)
    if options.as_json:
        print_json(run_document(run))
        return
    console = new_console()
    print_all(console, run_text(run, console))


command = takes_options(_command, CompileOptions)


def _compiled_run(options: CompileOptions) -> Run:
    if options.engine is not Engine.MESHSCOPE:
        raise SpecError(
            f"--engine {options.engine} has no program to compile. Use predict --engine {options.engine}."
        )
    experiment = asked_experiment(options)
    path = run_folder(experiment, options.out)
    profile = asked_profile(options.profile, experiment.topology.chip)
    predicted = predicted_run(experiment, profile)
    with new_folder(path, force=options.force) as partial:
        (partial / HLO).mkdir()
        with Progress() as progress:
            result = compile_experiment(
                experiment,
                partial / HLO,
                progress=progress,
                cycles=options.cycles,
                chip_profile=profile,
            )
        run = Run(
            path=None,
            manifest=new_manifest(
                Source.COMPILED,
                experiment.as_dict(),
                phases=experiment.phases,
                versions=result.versions,
                seconds=result.seconds,
                flags=result.flags,
            ),
            rows=(*predicted.rows, *result.rows),
            memory={**predicted.memory, Source.COMPILED: result.memory},
            times=(*predicted.times, *(step.time for step in result.steps)),
        )
        write_timeline(partial, result.steps)
        write_run(partial, run, metrics=metrics_document(run))
    return replace(run, path=path)
