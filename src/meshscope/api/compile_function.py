"""Compiles a user's JAX function for a slice, with everything that a built-in model's run has."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshscope.api.options import option, optional_path, request
from meshscope.api.records import new_record, saved
from meshscope.api.run import Run
from meshscope.backends.compile.function import compile_function, read_function
from meshscope.backends.compile.worker import DESCRIPTION, slice_devices
from meshscope.errors import SpecError
from meshscope.events.enums import Phase, Source
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.experiment_record import ExperimentRecord, NamedModel
from meshscope.programs.environments import check_tpu_compiler, chosen_compiler
from meshscope.store.write import HLO

if TYPE_CHECKING:
    from meshscope.programs.jax.function import FunctionProgram


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


def compile_user_function(
    function: Callable[..., Any], arguments: Sequence[Any], request: FunctionRequest
) -> Run:
    """The run of the compiled function, in memory or in the folder that the request names."""
    topology = parse_topology(request.topology)
    compiler = chosen_compiler(request.compiler)
    program = lowered_function(function, arguments, request)
    compiled = compile_function(program, topology, is_cached=request.cache, compiler=compiler)
    result = read_function(compiled, mesh=program.mesh, topology=topology, phase=request.phase)
    step, phase = result.step, result.step.time.phase
    experiment = function_record(function, program, topology, phase)
    record = new_record(
        Source.COMPILED,
        experiment,
        ("meshscope.compile", experiment.function or program.name, topology.name),
        phases=[phase],
        rows=result.rows,
        memory={Source.COMPILED: result.memory},
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
        mesh=axis_sizes(request.mesh) if isinstance(request.mesh, str) else request.mesh,
        devices=devices,
        name=request.name or function_name(function),
    )
    if program.n_devices != topology.n_devices:
        raise SpecError(
            f"{program.name} is a program for {program.n_devices} devices, and {topology.name} has "
            f"{topology.n_devices}. Give mesh='tp={topology.n_devices}' or arguments that are sharded "
            "over a mesh of all devices, or another topology."
        )
    return program


def described_devices(topology: Topology) -> list[Any]:
    """The devices of a TPU slice as the compiler describes them; SpecError for other slices."""
    if topology.chip.kind is not ChipKind.TPU:
        raise SpecError(
            f"'{topology.name}' is not a TPU slice; functions compile only for TPUs. Use a TPU slice, "
            "e.g. v6e-8."
        )
    check_tpu_compiler()
    for name, value in DESCRIPTION.items():  # libtpu reads them when it is loaded
        os.environ.setdefault(name, value)
    return slice_devices(topology)


def axis_sizes(text: str) -> dict[str, int]:
    """The axes of `dp=2,tp=4`, by any names."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (word.strip() for word in item.partition("="))
        if not name.isidentifier() or not re.fullmatch("[1-9][0-9]*", size):
            raise SpecError(
                f"mesh '{text}': '{item}' is not NAME=SIZE. Use for example 'dp=2,tp=4'."
            )
        sizes[name] = int(size)
    return sizes


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
