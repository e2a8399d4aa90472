"""`meshscope.run`: live devices, timed and profiled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshscope.api.progress import ReportedProgress, report_tracing_python
from meshscope.api.records import chip_profile, predicted_record, record_with_outcome, write_record
from meshscope.api.request import AUTO, LiveRequest, command_line, request_of, run_folder
from meshscope.api.run import Run
from meshscope.api.speculate import SpeculativeParts, speculative_parts
from meshscope.backends.live.checkpoint import Checkpoint, CheckpointText
from meshscope.backends.live.names import TRACE
from meshscope.backends.live.run import RunOptions, run_experiment, run_process
from meshscope.errors import SpecError, public
from meshscope.files import path_of
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import parse_topology
from meshscope.interconnect.profile import ChipProfile
from meshscope.model.config import read_model
from meshscope.plans.context_form import ContextForm
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.program import DEFAULT_FRONTEND, Engine, Frontend, Loop, Partitioner
from meshscope.programs.environments import check_can_run
from meshscope.reports.export.perfetto import write_profile_traces
from meshscope.serialize import picked
from meshscope.store.folder import new_folder, scratch_folder
from meshscope.store.run import DRAFT, SPECULATION, RunRecord
from meshscope.workers import Progress


@public
def run(  # noqa: D417, PLR0913  the options of the command
    model: str | Path,
    *,
    topology: str,
    plan: str,
    batch: int = 1,
    prompt: int = 128,
    output: int = 128,
    dtype: str | None = None,
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
    layers: int | None = None,
    engine: Engine | str = Engine.MESHSCOPE,
    partitioner: Partitioner | str = Partitioner.MANUAL,
    frontend: Frontend | str = DEFAULT_FRONTEND,
    loop: Loop | str = Loop.AUTO,
    context: ContextForm | str = ContextForm.AUTO,
    kernels: Kernels | str = Kernels.AUTO,
    dispatch: DispatchForm | str = DispatchForm.AUTO,
    capacity_factor: float | None = None,
    microbatches: int | None = None,
    prefill_chunk: int | str = "auto",
    routing_skew: float = 1.0,
    device_order: str | None = None,
    profile: str | Path | None = None,
    repeats: int = 3,
    warmup: int = 1,
    profiled_steps: int = 4,
    checkpoint: str | Path | None = None,
    prompt_text: str | None = None,
    speculate: str | None = None,
    coordinator: str | None = None,
    process_id: int = 0,
    n_processes: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Runs a model on the devices that JAX lists, times and profiles it, and saves a run.

    `cpu:8` makes eight virtual devices of this machine's CPU.

    Example:
        >>> run = meshscope.run("Qwen/Qwen3-4B", topology="cpu:4", plan="tp=4", layers=1)
        >>> run.time.decode_step_s  # mean seconds of the timed decode steps

    Takes the options of `meshscope.predict`, and these.

    Args:
        dtype: As for `predict`; None is f32 on a CPU, else `auto`.
        repeats: Timed requests.
        warmup: Untimed requests before them.
        profiled_steps: Decode steps in the profile, taken after the timed requests.
        checkpoint: Folder with weights and tokenizer in Hugging Face's format; else random weights.
        prompt_text: Prompt of every sequence, for the checkpoint's tokenizer.
        speculate: Speculative decoding, as for `meshscope.compile`. Steps of the verification and of the
            draft are timed and profiled, too, and are `Run.speculation`. Acceptance is not measured.
        coordinator: HOST:PORT of process 0, if several processes run together.
        process_id: Number of this process; process 0 saves the run.
        n_processes: Number of processes.
        seed: Seed of random weights and prompts.
        out: Folder of the run; by default `runs/<model>-<slice>-<plan>`.
        force: Replace the run in this folder.
        progress: Called with a part of the work, its step, and the seconds left or None.

    Returns:
        A run with the sources `predicted`, `compiled` and `measured`; in processes other than 0
        the prediction alone.

    Raises:
        MeshscopeError: The request is impossible, the devices fail or are missing, or the folder
            exists.
    """
    request = request_of(LiveRequest, {**locals(), "dtype": dtype or ""})
    return run_request(
        request, out=None if out is None else path_of(out), force=force, progress=progress
    )


def run_request(
    request: LiveRequest, *, out: Path | None, force: bool, progress: Progress | None
) -> Run:
    """The measured run that the request asks for; the prediction in processes other than 0."""
    prepared = prepared_run(request)
    experiment, options, parts = prepared.experiment, prepared.options, prepared.parts
    path = run_folder(request, experiment, out)
    profile = chip_profile(request.profile, experiment.topology.chip)
    command = command_line("run", request, out=out)
    report = ReportedProgress(progress)
    report_tracing_python(report, experiment)
    running = _Running(command=command, profile=profile, text=prepared.text)
    if options.process_id:
        _join(prepared, report)
        return Run(record=predicted_record(experiment, command, profile))
    with new_folder(path, force=force) as partial:
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
