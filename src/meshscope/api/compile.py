"""`meshscope.compile`: the TPU or GPU compiler, without the hardware."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

from meshscope.api.checkpoint_note import checkpoint_notes
from meshscope.api.compile_function import compile_user_function, function_request
from meshscope.api.compile_training import compile_training_request
from meshscope.api.idle_options import idle_option
from meshscope.api.progress import ReportedProgress, compile_progress, report_tracing_python
from meshscope.api.records import (
    chip_profile,
    noting_own_program,
    predicted_record,
    record_with_outcome,
    write_record,
)
from meshscope.api.request import (
    CompileRequest,
    ExperimentRequest,
    command_line,
    request_of,
    run_folder,
)
from meshscope.api.run import Run
from meshscope.api.speculate import speculative_parts
from meshscope.backends.compile.compile import (
    compile_experiment,
)
from meshscope.backends.compile.cycles import Cycles
from meshscope.cost.timeline import write_timeline
from meshscope.errors import SpecError, public
from meshscope.events.enums import Phase
from meshscope.files import path_of
from meshscope.interconnect.profile import ChipProfile
from meshscope.plans.context_form import ContextForm
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.program import DEFAULT_FRONTEND, Engine, Frontend, Loop, Partitioner
from meshscope.programs.environments import Compiler, chosen_compiler, installed_release
from meshscope.programs.frontends import check_can_compile
from meshscope.store.folder import new_folder
from meshscope.store.run import SPECULATION, RunRecord
from meshscope.store.write import HLO
from meshscope.workers import Progress


@public
def compile(  # noqa: A001, D417, PLR0913  the command's name and its options
    model: str | Path | Callable[..., Any],
    *arguments: Any,
    topology: str,
    plan: str | None = None,
    keywords: Mapping[str, Any] | None = None,
    mesh: Any = None,
    name: str | None = None,
    phase: Phase | str | None = None,
    cache: bool = True,
    batch: int = 1,
    prompt: int = 128,
    output: int = 128,
    dtype: str = "auto",
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
    cycles: Cycles | str = Cycles.ESTIMATED,
    engine_version: str | None = None,
    compiler: str | None = None,
    training: bool = False,
    speculate: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Compiles a model's prefill and decode, or a JAX function, for a slice without the hardware.

    Needs the extra `tpu`, or `cuda` for models on GPU slices. Takes seconds to minutes.

    Example:
        >>> run = meshscope.compile("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", layers=2)
        >>> run.compare().verdict  # of predicted and compiled collectives
        >>> run = meshscope.compile(train_step, params, batch, topology="v6e-8", mesh="dp=8")
        >>> run.collectives.select("kind", "axis", "wire_bytes", "source_line")

    A model takes the options of `meshscope.predict`, `cycles`, `out`, `force` and `progress`. A function
    takes its arguments (arrays, or `jax.ShapeDtypeStruct` with shardings), `keywords`, `mesh`, `name`, `phase`,
    `cache`, `out` and `force`; its rows have the axis names of its mesh and its own source lines.

    Args:
        model: A model of `meshscope models`, a config file, or a JAX function, jitted or not.
        arguments: The arguments of the function.
        keywords: Its keyword arguments.
        mesh: A JAX mesh, or axis sizes such as `dp=2,tp=4` for arguments sharded by PartitionSpecs; by
            default the mesh of the arguments' shardings.
        name: Name of the function in tables.
        phase: `prefill` or `decode` if the function is one; by default what its scopes say, else `step`.
        cache: Take an unchanged program from the cache.
        cycles: Time of compute by the compiler's estimates, or by its slower cycle `profile`.
        engine_version: Release of the engine that is the `frontend`; by default the newest one that
            is installed.
        compiler: Another version of JAX and libtpu, such as `jax-0.9.2`, that `meshscope compilers install`
            installed. A function is traced by the JAX of this process and compiled by that one.
        training: Compile a training step of `frontend` maxtext instead, of `batch` sequences of `prompt`
            tokens. Its rows have the phase `step`, and nothing is predicted.
        speculate: Speculative decoding: `mtp:k=1,acceptance=0.85`, `eagle:...` or `draft:MODEL,...`. The
            verification and the draft are compiled, too, and are `Run.speculation`.
        out: Folder of the run; by default `runs/<model>-<slice>-<plan>`. A function's run stays in memory.
        force: Replace the run in this folder.
        progress: Called with a part of the work, its step, and the seconds left or None.

    Returns:
        A run with the sources `predicted` and `compiled`; a function has only the latter.

    Raises:
        MeshscopeError: The request is impossible, the function does not trace, the compiler fails or is
            missing, or the folder exists.
    """
    options = dict(locals())
    home = None if out is None else path_of(out)
    if callable(model):
        _check_only(_MODEL_OPTIONS, options, f"a model, and {model!r} is a function")
        return compile_user_function(function_request(options), out=home, force=force)
    _check_only(_FUNCTION_OPTIONS, options, f"a function, and '{model}' is a model")
    if plan is None:
        raise SpecError(f"'{model}' has no plan. Give one, such as plan='tp=8'.")
    request = request_of(CompileRequest, options)
    return compile_request(request, out=home, force=force, progress=progress)


def _check_only(names: Iterable[str], options: Mapping[str, Any], what: str) -> None:
    """SpecError if an option among these differs from its default."""
    parameters = signature(compile).parameters
    for name in names:
        default = () if name == "arguments" else parameters[name].default
        if options[name] != default:
            raise SpecError(f"{name}={options[name]!r} is an option of {what}. Leave it out.")


_FUNCTION_OPTIONS = ("arguments", "keywords", "mesh", "name", "phase", "cache")
_SHARED_OPTIONS = {"model", "topology", "compiler"}
_MODEL_OPTIONS = tuple(f.name for f in fields(CompileRequest) if f.name not in _SHARED_OPTIONS)


def compile_request(
    request: CompileRequest, *, out: Path | None, force: bool, progress: Progress | None
) -> Run:
    """The compiled run that the request asks for."""
    compiler = chosen_compiler(request.compiler)
    if request.training and request.speculate is not None:
        raise idle_option("speculate", request.speculate, "a training step drafts no tokens")
    if request.training:
        experiment = _with_engine_version(request.experiment(), request)
        return compile_training_request(
            request, experiment, out=out, force=force, progress=progress
        )
    experiment = compilable_experiment(request, compiler)
    path = run_folder(request, experiment, out)
    profile = chip_profile(request.profile, experiment.topology.chip)
    command = command_line("compile", request, out=out)
    parts = speculative_parts(experiment, request.speculate, has_program=True)
    report = compile_progress(progress, experiment, path)
    report_tracing_python(report, experiment)
    compiling = _Compiling(
        command=command, cycles=request.cycles, profile=profile, compiler=compiler
    )
    with new_folder(path, force=force) as partial:
        record = compiling.record(experiment, partial, report)
        if parts is not None:
            home = partial / SPECULATION
            record = parts.added_to(
                record,
                lambda name, part: compiling.record(part, home / name, report.of_part(name)),
            )
        write_record(record, partial)
    return Run(record=record.placed(path), warnings=checkpoint_notes(request, experiment))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiling:
    """How the programs of a request are compiled and timed."""

    command: Sequence[str]
    cycles: Cycles
    profile: ChipProfile | None
    compiler: Compiler | None

    def record(self, experiment: Experiment, folder: Path, report: ReportedProgress) -> RunRecord:
        """The prediction with the compiled programs, whose HLO and timeline are written to the folder."""
        predicted = predicted_record(experiment, self.command, self.profile)
        if experiment.program.frontend.is_own:
            predicted = noting_own_program(predicted, experiment, self.profile)
        (folder / HLO).mkdir(parents=True)
        result = compile_experiment(
            experiment,
            folder / HLO,
            progress=report,
            cycles=self.cycles,
            chip_profile=self.profile,
            compiler=self.compiler,
        )
        write_timeline(folder, result.steps)
        layers = result.timed_layers
        return record_with_outcome(
            predicted,
            result,
            times=result.times,
            timed_layers=layers,
            others=[other for step in result.steps for other in step.others],
        )


def compilable_experiment(
    request: ExperimentRequest, compiler: Compiler | None = None
) -> Experiment:
    """The experiment; SpecError if no compiler can take it, or not this one."""
    if request.engine is not Engine.MESHSCOPE:
        raise SpecError(
            f"--engine {request.engine} has no program to compile. Use predict --engine {request.engine}, "
            f"or --frontend vllm-tpu for vLLM's own programs on TPUs."
        )
    experiment = _with_engine_version(request.experiment(), request)
    check_can_compile(experiment, compiler)
    return experiment


def _with_engine_version(experiment: Experiment, request: ExperimentRequest) -> Experiment:
    """The experiment with the release of its engine, which must be installed."""
    version = request.engine_version if isinstance(request, CompileRequest) else None
    program = experiment.program
    if not program.frontend.is_served:
        if version is not None:
            raise idle_option(
                "engine_version", version, f"--frontend {program.frontend} is no serving engine"
            )
        return experiment
    if isinstance(request, CompileRequest) and request.cycles is not Cycles.ESTIMATED:
        raise SpecError(f"--cycles {request.cycles} is not supported for engines. Drop it.")
    release = installed_release(program.frontend, version)
    return replace(experiment, program=replace(program, engine_version=release.version))
