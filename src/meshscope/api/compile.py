"""`meshscope.compile`: the TPU compiler, without the hardware, for a model or a user's JAX function."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import BoundArguments, Parameter, Signature
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, overload

from meshscope.api.console import Shown, WorkProgress, reporting, shown_run
from meshscope.api.findings import faults
from meshscope.api.options import (
    RunOutput,
    documented,
    hints_of,
    option,
    optional_path,
    parameters_of,
    request,
    request_of,
)
from meshscope.api.predict import made_run, speculative_parts
from meshscope.api.records import (
    checkpoint_notes,
    chip_profile,
    new_record,
    predicted_record,
    record_with_outcome,
    saved,
)
from meshscope.api.request import CompileRequest, command_line, run_folder
from meshscope.api.run import Run
from meshscope.backends.compile.compile import compile_experiment
from meshscope.backends.compile.function import compile_function, function_memory, read_function
from meshscope.backends.compile.worker import DESCRIPTION, slice_devices
from meshscope.cost.steps import write_timeline
from meshscope.errors import SpecError
from meshscope.events.enums import Phase, Source
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.experiment import Experiment
from meshscope.plans.experiment_record import ExperimentRecord, NamedModel
from meshscope.plans.program import Engine
from meshscope.programs.environments import Release, check_tpu_compiler, compiler_of
from meshscope.programs.frontends import compilable
from meshscope.serialize import picked
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO
from meshscope.units import counted, format_seconds

if TYPE_CHECKING:
    from meshscope.programs.jax.function import FunctionProgram

P = ParamSpec("P")
Model = str | Path | Callable[..., Any]


@request
class FunctionRequest:
    """The options of `compile` for a user's function, other than its arguments."""

    topology: str = option("The slice, such as v6e-8.")
    keywords: Mapping[str, Any] | None = option("Keyword arguments of the function.", default=None)
    mesh: Any = option(
        "A JAX mesh, or axis sizes such as dp=2,tp=4 for arguments sharded by PartitionSpecs; by default "
        "the mesh of the arguments' shardings.",
        default=None,
    )
    name: str | None = option("Name of the function in tables.", default=None)
    phase: Phase | None = option(
        "prefill or decode if the function is one; by default what its scopes say, else step.",
        default=None,
    )
    cache: bool = option("Take an unchanged program from the cache.", default=True)
    compiler: str | None = option(
        "Another version of JAX and libtpu; the function is traced by the JAX of this process.",
        default=None,
    )
    out: Path | None = option(
        "Folder of the run; by default it stays in memory.", default=None, converter=optional_path
    )
    force: bool = option("Replace the run in this folder.", default=False)


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
    is_function = callable(model)
    kind, what = CompileRequest, f"a function, and '{model}' is a model"
    if is_function:
        kind, what = FunctionRequest, f"a model, and {model!r} is a function"
    elif arguments:
        raise SpecError(
            f"'{model}' is a model, and only a function has further arguments. Leave them out."
        )
    for name in options.keys() - hints_of(kind):
        if options[name] != _SIGNATURE.parameters[name].default:
            raise SpecError(f"{name}={options[name]!r} is an option of {what}. Leave it out.")
    if is_function:
        return compile_user_function(model, arguments, request_of(FunctionRequest, options))
    if options.get("plan") is None:
        raise SpecError(f"'{model}' has no plan. Give one, such as plan='tp=8'.")
    return compile_request(request_of(CompileRequest, {"model": model, **options}))


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
        steps = [f"{time.phase} {format_seconds(time.step.value_s)}" for time in predicted.times]
        if steps:
            progress("predict", f"done, {', '.join(steps)}", None)
        (folder / HLO).mkdir(parents=True)
        how: dict[str, Any] = {"chip_profile": profile, "compiler": compiler}
        result = compile_experiment(part, folder / HLO, progress=progress, **how)
        write_timeline(folder, result.steps)
        others = tuple(other for step in result.steps for other in step.others)
        known: dict[str, Any] = {
            "other_operations": others,
            **picked(result, "times", "timed_layers"),
        }
        return record_with_outcome(predicted, result, **known)

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


def compile_user_function(
    function: Callable[..., Any], arguments: Sequence[Any], request: FunctionRequest
) -> Run:
    """The run of the compiled function, in memory or in the folder that the request names."""
    topology = parse_topology(request.topology)
    compiler = compiler_of(request.compiler)
    program = lowered_function(function, arguments, request)
    compiled = compile_function(program, topology, is_cached=request.cache, compiler=compiler)
    rows, step = read_function(compiled, mesh=program.mesh, topology=topology, phase=request.phase)
    phase = step.time.phase
    experiment = function_record(function, program, topology, phase)
    record = new_record(
        Source.COMPILED,
        experiment,
        ("meshscope.compile", experiment.function or program.name, topology.name),
        phases=[phase],
        rows=rows,
        memory={Source.COMPILED: function_memory(compiled.memory, topology)},
        times=(step.time,),
        versions=compiled.versions,
        seconds={f"{phase}.{name}": step_s for name, step_s in compiled.seconds.items()},
        other_operations=tuple(step.others),
    )
    if request.out is None:
        return Run(record=record, hlo=compiled.text)
    files = {f"{HLO}/{compiled.text.name}": compiled.text}
    return Run(record=saved(record, request.out, force=request.force, files=files, steps=[step]))


def lowered_function(
    function: Callable[..., Any], arguments: Sequence[Any], request: FunctionRequest
) -> "FunctionProgram":
    """The function in StableHLO for the slice; SpecError if it does not trace or uses other devices."""
    topology = parse_topology(request.topology)
    devices = described_devices(topology)
    from meshscope.programs.jax.function import function_name, lower_function  # imports JAX

    program = lower_function(
        function,
        arguments,
        request.keywords or {},
        mesh=request.mesh,
        devices=devices,
        name=request.name or function_name(function),
    )
    if program.n_devices != topology.n_devices:
        n, remedy = topology.n_devices, "Give shardings over all of its devices"
        if program.n_devices == 1:  # elsewhere, mesh= and shardings would have different meshes
            remedy = f"Give mesh='tp={n}' or arguments that are sharded over a mesh of all devices"
        raise SpecError(
            f"{program.name} is a program for {counted(program.n_devices, 'device')}, and "
            f"{topology.name} has {n}. {remedy}, or another topology."
        )
    if other := next((name for name, _ in program.mesh if not name.isascii()), None):
        raise SpecError(
            f"mesh axis '{other}': the TPU compiler reads names in ASCII alone. Give it another name."
        )
    return program


def described_devices(topology: Topology) -> list[Any]:
    """The devices of a TPU slice as the compiler describes them; SpecError for other slices."""
    topology.check_tpu("functions compile only for TPUs")
    check_tpu_compiler()
    for name, value in DESCRIPTION.items():  # libtpu reads them when it is loaded
        os.environ.setdefault(name, value)
    return slice_devices(topology)


def function_record(
    function: Callable[..., Any], program: "FunctionProgram", topology: Topology, phase: Phase
) -> ExperimentRecord:
    """What a function, its mesh and its slice say about an experiment."""
    from meshscope.programs.jax.function import defined_at  # imports JAX

    return ExperimentRecord(
        model=NamedModel(name=program.name),
        function=defined_at(function) or program.name,
        mesh=dict(program.mesh),
        topology=topology,
        n_devices=prod(dict(program.mesh).values()),
        n_chips=topology.n_chips,
        phase=phase,
    )


def command(request: CompileRequest, output: RunOutput) -> Shown:
    """Compile for a TPU slice without the hardware.

    Prefill and decode compile in parallel. Saves a run; the tables show predicted beside compiled
    collectives, and the verdict on them has the number of findings of lint, certain and possible.
    """
    with WorkProgress() as progress:
        run = compile_request(replace(request, progress=progress))
    return shown_run(run, rows=output.rows, n_findings=len(faults(run.record) or ()))
