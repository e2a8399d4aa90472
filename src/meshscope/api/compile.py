"""`meshscope.compile`: the TPU or GPU compiler, without the hardware."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import BoundArguments, Parameter, Signature
from pathlib import Path
from typing import Any, ParamSpec, Protocol, overload

from meshscope.api.compile_function import (
    FunctionRequest,
    compile_user_function,
    named_experiment,
    step_record,
)
from meshscope.api.console import ReportedProgress, WorkProgress, print_run
from meshscope.api.options import (
    RunOutput,
    changed_options,
    documented,
    hints_of,
    parameters_of,
    request_of,
)
from meshscope.api.predict import made_run, speculative_parts
from meshscope.api.records import (
    checkpoint_notes,
    chip_profile,
    noting_own_program,
    predicted_record,
    record_with_outcome,
    run_progress,
)
from meshscope.api.request import (
    CompileRequest,
    ExperimentRequest,
    command_line,
    idle_option,
    run_folder,
)
from meshscope.api.run import Run
from meshscope.backends.compile.compile import compile_experiment, compile_step_program
from meshscope.backends.compile.function import FunctionResult, read_step
from meshscope.cost.steps import write_timeline
from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Cycles, Engine
from meshscope.programs.engines.engine_config import MAXTEXT_AXES, maxtext_model
from meshscope.programs.engines.limits import check_slice
from meshscope.programs.environments import Release, chosen_compiler, installed_release
from meshscope.programs.frontends import check_can_compile, program_file
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.scopes import with_scopes
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO

P = ParamSpec("P")
Model = str | Path | Callable[..., Any]


class _Compile(Protocol[P]):
    """`compile` for a model with the options of its request, or for a function with its arguments."""

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Run: ...
    @overload
    def __call__(
        self, model: Callable[..., Any], *arguments: Any, topology: str, **options: Any
    ) -> Run: ...


def _compiled(bound: BoundArguments) -> Run:
    """Compiles a model's prefill and decode, or a JAX function, for a slice without the hardware.

    Needs the extra `tpu`, or `cuda` for models on GPU slices. Takes seconds to minutes.

    Example:
        >>> run = meshscope.compile("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", layers=2)
        >>> run.compare().verdict  # of predicted and compiled collectives
        >>> run = meshscope.compile(train_step, params, batch, topology="v6e-8", mesh="dp=8")
        >>> run.collectives.select("kind", "axis", "wire_bytes", "source_line")

    A function takes its arguments (arrays, or `jax.ShapeDtypeStruct` with shardings), `topology`, `keywords`,
    `mesh`, `name`, `phase`, `cache`, `compiler`, `out` and `force`; its rows have the axis names of its mesh and
    its own source lines. A model takes the other options. With `training`, the rows of the step have the phase
    `step`, and nothing is predicted. With `speculate`, the verification and the draft are compiled, too, and are
    `Run.speculation`.

    Returns:
        A run with the sources `predicted` and `compiled`; a function has only the latter.

    Raises:
        MeshscopeError: The request is impossible, the function does not trace, the compiler fails or is
            missing, or the folder exists.
    """
    options = dict(bound.arguments)
    model, arguments = options.pop("model"), options.pop("arguments", ())
    if callable(model):
        _check_only(FunctionRequest, options, f"a model, and {model!r} is a function")
        return compile_user_function(model, arguments, request_of(FunctionRequest, options))
    if arguments:
        raise SpecError(
            f"arguments={arguments!r} is an option of a function, and '{model}' is a model. Leave it out."
        )
    _check_only(CompileRequest, options, f"a function, and '{model}' is a model")
    if options.get("plan") is None:
        raise SpecError(f"'{model}' has no plan. Give one, such as plan='tp=8'.")
    return compile_request(request_of(CompileRequest, {"model": model, **options}))


def _check_only(kind: Any, options: Mapping[str, Any], what: str) -> None:
    """SpecError if an option that `kind` lacks differs from its default."""
    for name in options.keys() - hints_of(kind):
        if options[name] != _SIGNATURE.parameters[name].default:
            raise SpecError(f"{name}={options[name]!r} is an option of {what}. Leave it out.")


def _signature() -> Signature:
    """The options of both requests, with the function and its arguments, which exclude a plan."""
    model = Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=Model)
    arguments = Parameter("arguments", Parameter.VAR_POSITIONAL, annotation=Any)
    both = {one.name: one for kind in _REQUESTS for one in parameters_of(kind)}
    del both["model"]
    both["plan"] = both["plan"].replace(default=None, annotation=str | None)
    return Signature([model, arguments, *both.values()], return_annotation=Run)


def _typed_by(_kind: Callable[P, Any], function: Any) -> _Compile[P]:
    return function


_REQUESTS = (FunctionRequest, CompileRequest)
_SIGNATURE = _signature()
compile = _typed_by(CompileRequest, documented(_compiled, _SIGNATURE, *_REQUESTS, name="compile"))  # noqa: A001


def compile_request(request: CompileRequest) -> Run:
    """The compiled run that the request asks for."""
    compiler = chosen_compiler(request.compiler)
    if request.training:
        if request.speculate is not None:
            raise idle_option("speculate", request.speculate, "a training step drafts no tokens")
        experiment = _with_engine_version(request.experiment(), request)
        return compile_training_request(request, experiment)
    experiment = compilable_experiment(request, compiler)
    path = run_folder(request, experiment)
    profile = chip_profile(request.profile, experiment.topology.chip)
    command = command_line("compile", request)
    parts = speculative_parts(experiment, request.speculate, has_program=True)
    report = run_progress(request.progress, experiment, path.parent)

    def record_of(part: Experiment, folder: Path, name: str) -> RunRecord:
        """The prediction with the compiled programs, whose HLO and timeline are written to the folder."""
        predicted = predicted_record(part, command, profile)
        if part.program.frontend.is_own:
            predicted = noting_own_program(predicted, part, profile)
        (folder / HLO).mkdir(parents=True)
        result = compile_experiment(
            part,
            folder / HLO,
            progress=report.of_part(name),
            cycles=request.cycles,
            chip_profile=profile,
            compiler=compiler,
        )
        write_timeline(folder, result.steps)
        return record_with_outcome(
            predicted,
            result,
            times=result.times,
            timed_layers=result.timed_layers,
            other_operations=tuple(other for step in result.steps for other in step.others),
        )

    record = made_run(path, experiment, parts, record_of, force=request.force)
    return Run(record=record, warnings=checkpoint_notes(request, experiment))


# Options that a training step does not have.
_OF_INFERENCE = ("output", "weight_dtype", "cache_dtype", "prefill_chunk")
_FUNCTION = "maxtext/trainers/pre_train/train.py"  # its train_step


def compile_training_request(request: CompileRequest, experiment: Experiment) -> Run:
    """The run of the training step: the batch is the global one, and the prompt a sequence's length."""
    changed = changed_options(request)
    for name in _OF_INFERENCE:
        if name in changed:
            raise idle_option(name, changed[name], "a training step has none")
    check_can_compile_training(experiment)
    path = run_folder(request, experiment)
    profile = chip_profile(request.profile, experiment.topology.chip)
    report = ReportedProgress(request.progress)

    def record_of(experiment: Experiment, folder: Path, _name: str) -> RunRecord:
        (folder / HLO).mkdir()
        compiled = compile_step_program(experiment, folder / HLO, progress=report)
        report(Phase.STEP, "reading")
        result = read_training(experiment, folder / HLO, compiled, chip_profile=profile)
        write_timeline(folder, [result.step])
        model, workload = experiment.model, experiment.workload
        name = (
            f"training step of {model.name} ({model.n_layers} layers), {workload.batch} sequences of "
            f"{workload.prompt} tokens"
        )
        axes = dict(experiment.plan.mesh.axes)
        named = named_experiment(name, _FUNCTION, axes, experiment.topology, Phase.STEP)
        return step_record(named, command_line("compile", request), result, compiled)

    return Run(record=made_run(path, experiment, None, record_of, force=request.force))


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
            f"plan '{plan}': --training takes {', '.join(MAXTEXT_AXES)}, not {used[0]}. Use fsdp={plan.n_devices}."
        )
    installed_release(program.frontend, program.engine_version)


def read_training(
    experiment: Experiment,
    hlo_dir: Path,
    report: dict[str, Any],
    *,
    chip_profile: ChipProfile | None = None,
) -> FunctionResult:
    """The rows, memory and time of a compiled step; rows have parts and no layers."""
    return read_step(
        with_scopes(read_hlo(hlo_dir / program_file(Phase.STEP))),
        report["memory"],
        replace(experiment.plan.mesh, order=tuple(report["order"])),
        experiment.topology,
        phase=Phase.STEP,
        chip_profile=chip_profile,
    )


def compilable_experiment(
    request: ExperimentRequest, compiler: Release | None = None
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


def command(request: CompileRequest, output: RunOutput) -> None:
    """Compile for a TPU or GPU slice without the hardware.

    Prefill and decode compile in parallel. Saves a run; the tables show predicted beside compiled
    collectives.
    """
    with WorkProgress() as progress:
        run = compile_request(replace(request, progress=progress))
    print_run(run, output)
