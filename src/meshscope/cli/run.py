"""`meshscope run`: live devices, timed and profiled."""

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
from meshscope.cli.progress import Progress
from meshscope.errors import SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import parse_topology
from meshscope.plan.experiment import Engine
from meshscope.report.document import metrics_document, run_document
from meshscope.report.text import run_text
from meshscope.run.run import RunOptions, run_experiment
from meshscope.rundir.folder import new_folder
from meshscope.rundir.run import Run
from meshscope.rundir.write import write_run
from meshscope.table.kinds import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions(ExperimentOptions):
    """What the user asks for, as typed."""

    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="Of weights, activations and cache.",
            show_default="f32 on CPU, bf16 elsewhere",
        ),
    ] = ""
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that are timed.")] = 3
    warmup: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests before them that are not.")
    ] = 1
    profiled_steps: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Decode steps that are profiled, after those timed."),
    ] = 4
    seed: Annotated[int, typer.Option(min=0, help="Of random weights and prompts.")] = 0


def _command(options: LiveOptions) -> None:
    """Run on live devices, time and profile them, into a run.

    The devices are those that JAX sees; cpu:8 are virtual ones on this machine's CPU. Requests are
    timed after a warm-up, then one is profiled; the table puts predicted, compiled and measured side
    by side.
    """
    run = _live_run(options)
    if options.as_json:
        print_json(run_document(run))
        return
    console = new_console()
    print_all(console, run_text(run, console))


command = takes_options(_command, LiveOptions)


def _usual_dtype(options: LiveOptions) -> str:
    """XLA computes 16-bit numbers slowly on a CPU, and sends them in float32."""
    return "f32" if parse_topology(options.topology).chip.kind is ChipKind.CPU else "bf16"


def _live_run(options: LiveOptions) -> Run:
    if options.engine is not Engine.MESHSCOPE:
        raise SpecError(
            f"--engine {options.engine} has no program to run. Use predict --engine {options.engine}."
        )
    experiment = asked_experiment(replace(options, dtype=options.dtype or _usual_dtype(options)))
    path = run_folder(experiment, options.out)
    predicted = predicted_run(experiment)
    live = RunOptions(
        repeats=options.repeats,
        warmup=options.warmup,
        profiled_steps=options.profiled_steps,
        seed=options.seed,
    )
    with new_folder(path, force=options.force) as partial:
        with Progress() as progress:
            result = run_experiment(experiment, partial, live, progress=progress)
        run = Run(
            path=None,
            manifest=new_manifest(
                Source.MEASURED,
                experiment.as_dict(),
                phases=experiment.phases,
                versions=result.versions,
                seconds=result.seconds,
                flags=result.flags,
            ),
            rows=(*predicted.rows, *result.rows),
            memory={**predicted.memory, Source.COMPILED: result.memory},
            measured=result.measured,
        )
        write_run(partial, run, metrics=metrics_document(run))
    return replace(run, path=path)
