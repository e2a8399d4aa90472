"""`meshscope run`: live devices, timed and profiled."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from meshscope.arch.config import read_model
from meshscope.cli.making import new_manifest, predicted_run
from meshscope.cli.options import (
    ExperimentOptions,
    asked_experiment,
    run_folder,
    takes_options,
)
from meshscope.cli.output import new_console, note, print_all, print_json
from meshscope.cli.profiles import asked_profile
from meshscope.cli.progress import Progress
from meshscope.errors import SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import parse_topology
from meshscope.plan.experiment import Engine, Experiment
from meshscope.report.document import metrics_document, run_document
from meshscope.report.text import run_text
from meshscope.run.checkpoint import Checkpoint, Texts
from meshscope.run.run import RunOptions, run_experiment, run_process
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
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Weights and tokenizer, as Hugging Face writes them."),
    ] = None
    prompt_text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The prompt of every sequence, for the checkpoint."),
    ] = None
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Process 0, where several processes run together."),
    ] = None
    process_id: Annotated[
        int, typer.Option(metavar="I", min=0, help="Which of them this is; 0 writes the run.")
    ] = 0
    n_processes: Annotated[int, typer.Option(metavar="N", min=1, help="How many they are.")] = 1
    seed: Annotated[int, typer.Option(min=0, help="Of random weights and prompts.")] = 0


def _command(options: LiveOptions) -> None:
    """Run on live devices, time and profile them, into a run.

    The devices are those that JAX sees; cpu:8 are virtual ones on this machine's CPU. Requests are
    timed after a warm-up, then one is profiled; the table puts predicted, compiled and measured side
    by side.
    """
    run = _live_run(options)
    if run is None:
        note(f"process {options.process_id} is done; process 0 writes the run")
        return
    if options.as_json:
        print_json(run_document(run))
        return
    console = new_console()
    print_all(console, run_text(run, console))


command = takes_options(_command, LiveOptions)


def _usual_dtype(options: LiveOptions) -> str:
    """XLA computes 16-bit numbers slowly on a CPU, and sends them in float32."""
    return "f32" if parse_topology(options.topology).chip.kind is ChipKind.CPU else "bf16"


def _prompt(options: LiveOptions) -> tuple[Texts | None, tuple[int, ...] | None]:
    """The checkpoint's tokenizer and the prompt's tokens; None without a text."""
    if options.prompt_text is None:
        return None, None
    if options.checkpoint is None:
        raise SpecError("--prompt-text needs a tokenizer. Give --checkpoint DIR, too.")
    texts = Texts(options.checkpoint)
    return texts, texts.encoded(options.prompt_text)


def _check_checkpoint(experiment: Experiment, folder: Path) -> None:
    """SpecError when the checkpoint is of another model, or lacks tensors."""
    own = read_model(str(folder))
    own = own.first(min(experiment.model.n_layers, own.n_layers))
    asked = replace(own, name=experiment.model.name, source=experiment.model.source)
    if asked != experiment.model:
        raise SpecError(
            f"checkpoint '{folder}' is of another model than {experiment.model.name}. "
            f"Give the folder as MODEL, too: meshscope run {folder} --checkpoint {folder}."
        )
    Checkpoint(folder).check(experiment)


def _texts(texts: Texts | None, tokens: list[list[int]]) -> tuple[str, ...]:
    """What was generated, each different text once."""
    if texts is None:
        return ()
    return tuple(dict.fromkeys(texts.decoded(own) for own in tokens))


def _live_run(options: LiveOptions) -> Run | None:
    """The run; None in a process that only takes part in it."""
    if options.engine is not Engine.MESHSCOPE:
        raise SpecError(
            f"--engine {options.engine} has no program to run. Use predict --engine {options.engine}."
        )
    options = replace(options, dtype=options.dtype or _usual_dtype(options))
    texts, tokens = _prompt(options)
    if tokens is not None:
        options = replace(options, prompt=len(tokens))
    experiment = asked_experiment(options)
    if options.checkpoint is not None:
        _check_checkpoint(experiment, options.checkpoint)
    path = run_folder(experiment, options.out)
    profile = asked_profile(options.profile, experiment.topology.chip)
    predicted = predicted_run(experiment, profile)
    live = RunOptions(
        repeats=options.repeats,
        warmup=options.warmup,
        profiled_steps=options.profiled_steps,
        seed=options.seed,
        prompt_tokens=tokens,
        coordinator=options.coordinator,
        process_id=options.process_id,
        n_processes=options.n_processes,
        checkpoint=None if options.checkpoint is None else str(options.checkpoint.resolve()),
    )
    if live.process_id:
        with TemporaryDirectory(prefix="meshscope-") as scratch, Progress() as progress:
            run_process(experiment, Path(scratch), live, progress=progress)
        return None
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
            measured=replace(result.measured, texts=_texts(texts, result.tokens)),
            times=predicted.times,
        )
        write_run(partial, run, metrics=metrics_document(run))
    return replace(run, path=path)
