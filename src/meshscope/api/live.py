"""`meshscope.run`: live devices, timed and profiled."""

from dataclasses import fields, replace
from pathlib import Path

from meshscope.api.console import Shown, WorkProgress, note, reporting, shown_run
from meshscope.api.options import RunOutput, takes
from meshscope.api.predict import made_run, speculative_parts
from meshscope.api.records import chip_profile, predicted_record, record_with_outcome
from meshscope.api.request import AUTO, LiveRequest, command_line, run_folder
from meshscope.api.run import Run
from meshscope.backends.live.checkpoint import Checkpoint, CheckpointText
from meshscope.backends.live.run import RunOptions, run_experiment, run_process
from meshscope.errors import SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Tables
from meshscope.plans.program import Engine
from meshscope.programs.environments import check_can_run
from meshscope.serialize import picked
from meshscope.store.folder import scratch_folder
from meshscope.store.run import DRAFT, RunRecord


def run_request(request: LiveRequest) -> Run:
    """Runs a model on the devices that JAX lists, times and profiles it, and saves a run.

    `cpu:8` makes eight virtual devices of this machine's CPU.

    Example:
        >>> run = meshscope.run("Qwen/Qwen3-4B", topology="cpu:4", plan="tp=4", layers=1)
        >>> run.time.decode_step_s  # mean seconds of the timed decode steps

    With `speculate`, steps of the verification and of the draft are timed and profiled, too, and are
    `Run.speculation`; their acceptance is not measured.

    Returns:
        A run with the sources `predicted`, `compiled` and `measured`; in processes other than 0
        the prediction alone.

    Raises:
        MeshscopeError: The request is impossible, the devices fail or are missing, or the folder
            exists.
    """
    experiment, run_options, text = prepared_run(request)
    parts = speculative_parts(experiment, request.speculate, has_program=True)

    def options_of(name: str) -> RunOptions:
        """Steps of a part follow no prompt, and no checkpoint has the weights of the draft."""
        if not name:
            return run_options
        checkpoint = None if name == DRAFT else run_options.checkpoint
        return replace(run_options, prompt_tokens=None, checkpoint=checkpoint)

    path, command = run_folder(request, experiment), command_line("run", request)
    profile = chip_profile(request.profile, experiment.topology.chip)
    if request.process_id:  # process 0 has all results
        for name, part in (("", experiment), *(() if parts is None else parts.by_name.items())):
            with scratch_folder() as scratch:
                progress = reporting(request.progress, name)
                run_process(part, scratch, options_of(name), progress=progress)
        return Run(record=predicted_record(experiment, command, profile))

    def record_of(part: Experiment, folder: Path, name: str) -> RunRecord:
        """The prediction with what ran on the devices, whose HLO and profile are written to the folder."""
        progress = reporting(request.progress, name)
        result = run_experiment(part, folder, options_of(name), progress=progress)
        measured = result.measured
        if text is not None and not part.is_part_of_decode:
            texts = dict.fromkeys(map(text.decoded, result.tokens))
            measured = replace(measured, texts=tuple(texts))
        predicted = predicted_record(part, command, profile)
        return record_with_outcome(predicted, result, measured=measured)

    return Run(record=made_run(path, experiment, parts, record_of, force=request.force))


run = takes("run", LiveRequest, run_request)


# Options of the request that workers need.
_PASSED = [
    one.name for one in fields(RunOptions) if one.name not in {"prompt_tokens", "checkpoint"}
]


def prepared_run(request: LiveRequest) -> tuple[Experiment, RunOptions, CheckpointText | None]:
    """The experiment, its options and its tokenizer, checked without devices; MeshscopeError for a wrong request."""
    if request.engine is not Engine.MESHSCOPE:
        raise SpecError(
            f"--engine {request.engine} has no program to run. Use predict --engine {request.engine}."
        )
    # f32 on a CPU, where XLA computes 16-bit numbers slowly and sends them as float32
    is_cpu = parse_topology(request.topology).chip.kind is ChipKind.CPU
    request = replace(request, dtype=request.dtype or ("f32" if is_cpu else AUTO))
    text, tokens, checkpoint = None, None, request.checkpoint
    if request.prompt_text is not None:
        if checkpoint is None:
            raise SpecError("--prompt-text needs a tokenizer. Give --checkpoint DIR, too.")
        text = CheckpointText(checkpoint)
        tokens = text.encoded(request.prompt_text)
        request = replace(request, prompt=len(tokens))
    experiment = request.experiment()
    if experiment.plan.tables is Tables.HOST:
        raise SpecError(
            f"plan '{experiment.plan}': tables=host needs a server that reads rows on the host before each step, which "
            "run lacks: only predict, plan and compile take it. Use tables=all."
        )
    if checkpoint is not None and experiment.model.engram is not None:
        raise SpecError(
            f"--checkpoint: the hashes of n-grams of {experiment.model.name} have constants of its tokenizer, which "
            "programs lack, so that its tables would be read in wrong rows. Drop the option for random weights."
        )
    if checkpoint is not None:
        asked, model = experiment.model, read_model(str(checkpoint))
        model = model.first(min(asked.n_layers, model.n_layers))
        if replace(model, name=asked.name, source=asked.source) != asked:
            raise SpecError(
                f"checkpoint '{checkpoint}' belongs to another model than {asked.name}. Also give the "
                f"folder as MODEL: meshscope run {checkpoint} --checkpoint {checkpoint}."
            )
        Checkpoint(checkpoint).check(experiment)
    if experiment.program.frontend.is_own:
        check_can_run()
    options = RunOptions(
        **picked(request, *_PASSED),
        prompt_tokens=tokens,
        checkpoint=None if checkpoint is None else str(checkpoint.resolve()),
    )
    return experiment, options, text


def command(request: LiveRequest, output: RunOutput) -> Shown | None:
    """Run on live devices, timed and profiled.

    Uses the devices that JAX lists; cpu:8 makes virtual devices of this machine's CPU. Requests are
    timed after a warm-up, then one is profiled. Saves a run; the tables show predicted, compiled and
    measured side by side. With --speculate, the step that verifies drafted tokens and the step of the draft
    are timed and profiled, too; their acceptance is the stated one, not measured.
    """
    with WorkProgress() as progress:
        run = run_request(replace(request, progress=progress))
    if request.process_id:
        note(f"process {request.process_id} is done; process 0 writes the run")
        return None
    return shown_run(run, rows=output.rows)
