"""`meshscope run`: live devices, timed and profiled."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from meshscope.backends.live.checkpoint import Checkpoint, CheckpointText
from meshscope.backends.live.names import TRACE
from meshscope.backends.live.run import RunOptions, check_can_run, run_experiment, run_process
from meshscope.cli.keeping import keep
from meshscope.cli.making import predicted_run, run_of
from meshscope.cli.options import (
    LiveOptions,
    asked_experiment,
    run_folder,
    takes_options,
)
from meshscope.cli.output import new_console, note, print_all, print_json
from meshscope.cli.profiles import asked_profile
from meshscope.cli.progress import CompileProgress
from meshscope.cli.tracing import tell_python
from meshscope.errors import SpecError
from meshscope.exporters.profile_traces import write_profile_traces
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.program import Engine, Frontend
from meshscope.store.folder import new_folder
from meshscope.store.run import RunRecord
from meshscope.views.document import run_document
from meshscope.views.text import run_text


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


def _prompt(options: LiveOptions) -> tuple[CheckpointText | None, tuple[int, ...] | None]:
    """The checkpoint's tokenizer and the prompt's tokens; None without a text."""
    if options.prompt_text is None:
        return None, None
    if options.checkpoint is None:
        raise SpecError("--prompt-text needs a tokenizer. Give --checkpoint DIR, too.")
    texts = CheckpointText(options.checkpoint)
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


def _texts(texts: CheckpointText | None, tokens: list[list[int]]) -> tuple[str, ...]:
    """What was generated, each different text once."""
    if texts is None:
        return ()
    return tuple(dict.fromkeys(texts.decoded(own) for own in tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was asked for, checked: the experiment, how it is run, and the checkpoint's tokenizer."""

    experiment: Experiment
    live: RunOptions
    texts: CheckpointText | None


def prepared(options: LiveOptions) -> Prepared:
    """What the options ask for, as far as it can be checked without devices."""
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
    if experiment.program.frontend is Frontend.JAX:
        check_can_run()
    return Prepared(experiment=experiment, live=live, texts=texts)


def _live_run(options: LiveOptions) -> RunRecord | None:
    """The run; None in a process that only takes part in it."""
    asked = prepared(options)
    experiment, live = asked.experiment, asked.live
    tell_python(experiment)
    path = run_folder(experiment, options.out)
    profile = asked_profile(options.profile, experiment.topology.chip)
    predicted = predicted_run(experiment, profile)
    if live.process_id:
        with TemporaryDirectory(prefix="meshscope-") as scratch, CompileProgress() as progress:
            run_process(experiment, Path(scratch), live, progress=progress)
        return None
    with new_folder(path, force=options.force) as partial:
        with CompileProgress() as progress:
            result = run_experiment(experiment, partial, live, progress=progress)
            write_profile_traces(result.profile, partial / TRACE)
        measured = replace(result.measured, texts=_texts(asked.texts, result.tokens))
        run = run_of(experiment, predicted, result, measured=measured)
        keep(run, partial)
    return replace(run, path=path)
