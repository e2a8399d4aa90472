"""`meshscope.compile`: the TPU compiler, without the hardware."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import BoundArguments, Parameter, Signature
from pathlib import Path
from typing import Any, ParamSpec, Protocol, overload

from meshscope.api.compile_function import FunctionRequest, compile_user_function
from meshscope.api.console import WorkProgress, print_run, reporting
from meshscope.api.options import RunOutput, documented, hints_of, parameters_of, request_of
from meshscope.api.predict import made_run, speculative_parts
from meshscope.api.records import (
    checkpoint_notes,
    chip_profile,
    predicted_record,
    record_with_outcome,
)
from meshscope.api.request import CompileRequest, command_line, run_folder
from meshscope.api.run import Run
from meshscope.backends.compile.compile import compile_experiment
from meshscope.cost.steps import write_timeline
from meshscope.errors import SpecError
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine
from meshscope.programs.environments import Release
from meshscope.programs.frontends import compilable
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

    Needs the extra `tpu`. Takes seconds to minutes.

    Example:
        >>> run = meshscope.compile("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", layers=2)
        >>> run.compare().verdict  # of predicted and compiled collectives
        >>> run = meshscope.compile(train_step, params, batch, topology="v6e-8", mesh="dp=8")
        >>> run.collectives.select("kind", "axis", "wire_bytes", "source_line")

    A function takes its arguments (arrays, or `jax.ShapeDtypeStruct` with shardings), `topology`, `keywords`,
    `mesh`, `name`, `phase`, `cache`, `compiler`, `out` and `force`; its rows have the axis names of its mesh and
    its own source lines. A model takes the other options. With `speculate`, the verification and the draft are
    compiled, too, and are `Run.speculation`.

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
    experiment, compiler = compilable_experiment(request)
    path, command = run_folder(request, experiment), command_line("compile", request)
    notes = checkpoint_notes(request, experiment)
    profile = chip_profile(request.profile, experiment.topology.chip)
    parts = speculative_parts(experiment, request.speculate, has_program=True)

    def record_of(part: Experiment, folder: Path, name: str) -> RunRecord:
        """The prediction with the compiled programs, whose HLO and timeline are written to the folder."""
        predicted = predicted_record(part, command, profile, is_compiled=True)
        progress = reporting(request.progress, name)
        (folder / HLO).mkdir(parents=True)
        result = compile_experiment(
            part,
            folder / HLO,
            progress=progress,
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
    return Run(record=record, warnings=notes)


def compilable_experiment(request: CompileRequest) -> tuple[Experiment, Release | None]:
    """The experiment, with the release of its engine, and the compiler; SpecError if no compiler, or not the chosen one, takes it."""
    if request.engine is not Engine.MESHSCOPE:
        raise SpecError(
            f"--engine {request.engine} has no program to compile. Use predict --engine {request.engine}, "
            f"or --frontend vllm-tpu for vLLM's own programs on TPUs."
        )
    return compilable(request.experiment(), request.engine_version, request.compiler)


def command(request: CompileRequest, output: RunOutput) -> None:
    """Compile for a TPU slice without the hardware.

    Prefill and decode compile in parallel. Saves a run; the tables show predicted beside compiled
    collectives.
    """
    with WorkProgress() as progress:
        run = compile_request(replace(request, progress=progress))
    print_run(run, output)
