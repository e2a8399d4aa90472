"""`meshscope.run`: live devices, timed and profiled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.api.console import WorkProgress, note, print_run
from meshscope.api.options import RunOutput, takes
from meshscope.api.progress import ReportedProgress, report_tracing_python
from meshscope.api.records import chip_profile, predicted_record, record_with_outcome, write_record
from meshscope.api.request import AUTO, LiveRequest, command_line, run_folder
from meshscope.api.run import Run
from meshscope.api.speculate import SpeculativeParts, speculative_parts
from meshscope.backends.live.checkpoint import Checkpoint, CheckpointText
from meshscope.backends.live.run import RunOptions, run_experiment, run_process
from meshscope.backends.live.worker import TRACE
from meshscope.errors import SpecError
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import parse_topology
from meshscope.interconnect.profile import ChipProfile
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine
from meshscope.programs.environments import check_can_run
from meshscope.reports.export.perfetto import write_profile_traces
from meshscope.serialize import picked
from meshscope.store.folder import new_folder, scratch_folder
from meshscope.store.run import DRAFT, SPECULATION, RunRecord


@takes(LiveRequest)
def run(request: LiveRequest) -> Run:
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
    return run_request(request)


def run_request(request: LiveRequest) -> Run:
    """The measured run that the request asks for; the prediction in processes other than 0."""
    prepared = prepared_run(request)
    experiment, options, parts = prepared.experiment, prepared.options, prepared.parts
    path = run_folder(request, experiment)
    profile = chip_profile(request.profile, experiment.topology.chip)
    command = command_line("run", request)
    report = ReportedProgress(request.progress)
    report_tracing_python(report, experiment)
    running = _Running(command=command, profile=profile, text=prepared.text)
    if options.process_id:
        _join(prepared, report)
        return Run(record=predicted_record(experiment, command, profile))
    with new_folder(path, force=request.force) as partial:
        record = running.record(experiment, partial, options, report)
        if parts is not None:
            record = parts.added_to(
                record,
                lambda name, part: running.record(
                    part,
                    partial / SPECULATION / name,
                    prepared.part_options(name),
                    report.of_part(name),
                ),
            )
        write_record(record, partial)
    return Run(record=record.placed(path))


def _join(prepared: "PreparedRun", report: ReportedProgress) -> None:
    """Runs as another process than the first, which has all results."""
    with scratch_folder() as scratch:
        run_process(prepared.experiment, scratch, prepared.options, progress=report)
    for name, part in ({} if prepared.parts is None else prepared.parts.by_name).items():
        with scratch_folder() as scratch:
            run_process(part, scratch, prepared.part_options(name), progress=report.of_part(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """How the programs of a request are recorded; `text` decodes the output of the request."""

    command: Sequence[str]
    profile: ChipProfile | None
    text: CheckpointText | None

    def record(
        self,
        experiment: Experiment,
        folder: Path,
        options: RunOptions,
        progress: ReportedProgress,
    ) -> RunRecord:
        """The prediction with what ran on the devices, whose HLO and profile are written to the folder."""
        result = run_experiment(experiment, folder, options, progress=progress)
        write_profile_traces(result.profile, folder / TRACE)
        text = None if experiment.is_part_of_decode else self.text
        measured = replace(result.measured, texts=_generated_texts(text, result.tokens))
        predicted = predicted_record(experiment, self.command, self.profile)
        return record_with_outcome(predicted, result, measured=measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A live request checked without devices: its experiments, its options, and the tokenizer."""

    experiment: Experiment
    parts: SpeculativeParts | None
    options: RunOptions
    text: CheckpointText | None

    def part_options(self, name: str) -> RunOptions:
        """The options of a part, whose steps follow no prompt; no checkpoint has the weights of the draft."""
        checkpoint = None if name == DRAFT else self.options.checkpoint
        return replace(self.options, prompt_tokens=None, checkpoint=checkpoint)


def prepared_run(request: LiveRequest) -> PreparedRun:
    """Everything about the request that can be checked without devices; MeshscopeError if it is wrong."""
    if request.engine is not Engine.MESHSCOPE:
        raise SpecError(
            f"--engine {request.engine} has no program to run. Use predict --engine {request.engine}."
        )
    request = replace(request, dtype=request.dtype or _default_dtype(request.topology))
    text, tokens = _prompt(request)
    if tokens is not None:
        request = replace(request, prompt=len(tokens))
    experiment = request.experiment()
    if request.checkpoint is not None:
        _check_checkpoint(experiment, request.checkpoint)
    if experiment.program.frontend.is_own:
        check_can_run()
    return PreparedRun(
        experiment=experiment,
        parts=speculative_parts(experiment, request.speculate, has_program=True),
        options=_run_options(request, tokens),
        text=text,
    )


def _run_options(request: LiveRequest, tokens: tuple[int, ...] | None) -> RunOptions:
    same = (
        "repeats",
        "warmup",
        "profiled_steps",
        "seed",
        "coordinator",
        "process_id",
        "n_processes",
    )
    checkpoint = None if request.checkpoint is None else str(request.checkpoint.resolve())
    return RunOptions(**picked(request, *same), prompt_tokens=tokens, checkpoint=checkpoint)


def _default_dtype(topology: str) -> str:
    """f32 on a CPU, where XLA computes 16-bit numbers slowly and sends them as float32."""
    return "f32" if parse_topology(topology).chip.kind is ChipKind.CPU else AUTO


def _prompt(request: LiveRequest) -> tuple[CheckpointText | None, tuple[int, ...] | None]:
    """The checkpoint's tokenizer and the tokens of the prompt; None without a text."""
    if request.prompt_text is None:
        return None, None
    if request.checkpoint is None:
        raise SpecError("--prompt-text needs a tokenizer. Give --checkpoint DIR, too.")
    text = CheckpointText(request.checkpoint)
    return text, text.encoded(request.prompt_text)


def _check_checkpoint(experiment: Experiment, folder: Path) -> None:
    """SpecError if the checkpoint belongs to another model or lacks tensors."""
    model = read_model(str(folder))
    model = model.first(min(experiment.model.n_layers, model.n_layers))
    if (
        replace(model, name=experiment.model.name, source=experiment.model.source)
        != experiment.model
    ):
        raise SpecError(
            f"checkpoint '{folder}' belongs to another model than {experiment.model.name}. "
            f"Also give the folder as MODEL: meshscope run {folder} --checkpoint {folder}."
        )
    Checkpoint(folder).check(experiment)


def _generated_texts(text: CheckpointText | None, tokens: list[list[int]]) -> tuple[str, ...]:
    """The generated texts, each different one once."""
    if text is None:
        return ()
    return tuple(dict.fromkeys(text.decoded(sequence) for sequence in tokens))


def command(request: LiveRequest, output: RunOutput) -> None:
    """Run on live devices, timed and profiled.

    Uses the devices that JAX lists; cpu:8 makes virtual devices of this machine's CPU. Requests are
    timed after a warm-up, then one is profiled. Saves a run; the tables show predicted, compiled and
    measured side by side. With --speculate, the step that verifies drafted tokens and that of the draft
    are timed and profiled, too; their acceptance is the stated one, not measured.
    """
    with WorkProgress() as progress:
        run = run_request(replace(request, progress=progress))
    if request.process_id:
        note(f"process {request.process_id} is done; process 0 writes the run")
        return
    print_run(run, as_json=output.as_json, is_full=output.full)
