"""Compiles a JAX function of the user for a slice, with all that a run of a built-in model has."""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshscope.api.records import new_manifest, write_record
from meshscope.api.run import Run
from meshscope.backends.compile.function import (
    CompiledFunction,
    FunctionResult,
    compile_function,
    read_function,
)
from meshscope.backends.compile.worker import DESCRIPTION, slice_devices
from meshscope.cost.timeline import write_timeline
from meshscope.errors import SpecError
from meshscope.events.enums import Phase, Source
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.plans.experiment_record import ExperimentRecord, NamedModel
from meshscope.programs.environments import chosen_compiler
from meshscope.programs.frontends import check_tpu_compiler
from meshscope.store.folder import new_folder
from meshscope.store.run import RunRecord
from meshscope.store.write import HLO

if TYPE_CHECKING:
    from meshscope.programs.jax.function import FunctionProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRequest:
    """A function of the user with its arguments, and the slice to compile it for.

    `mesh` is a JAX mesh, axis sizes such as `dp=2,tp=4`, or None for that of the shardings. `name` and
    `phase` replace those of the function and its scopes. `compiler` is another version of JAX and libtpu.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    topology: str
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mesh: Any = None
    name: str | None = None
    phase: Phase | None = None
    is_cached: bool = True
    compiler: str | None = None


def function_request(options: Mapping[str, Any]) -> FunctionRequest:
    """The request of `compile`'s arguments; SpecError for an unknown phase."""
    phase = options["phase"]
    if phase is not None and phase not in set(Phase):
        raise SpecError(f"phase: '{phase}' is not one of {', '.join(Phase)}.")
    return FunctionRequest(
        function=options["model"],
        arguments=options["arguments"],
        keywords=options["keywords"] or {},
        topology=options["topology"],
        mesh=options["mesh"],
        name=options["name"],
        phase=None if phase is None else Phase(phase),
        is_cached=options["cache"],
        compiler=options["compiler"],
    )


def compile_user_function(request: FunctionRequest, *, out: Path | None, force: bool) -> Run:
    """The run of the compiled function, in memory or in the folder `out`."""
    topology = parse_topology(request.topology)
    compiler = chosen_compiler(request.compiler)
    program = lowered_function(request, topology)
    compiled = compile_function(program, topology, is_cached=request.is_cached, compiler=compiler)
    result = read_function(compiled, mesh=program.mesh, topology=topology, phase=request.phase)
    record = _record(request, program, compiled, result)
    if out is None:
        return Run(record=record, hlo=compiled.text)
    with new_folder(out, force=force) as partial:
        (partial / HLO).mkdir()
        shutil.copyfile(compiled.text, partial / HLO / compiled.text.name)
        write_timeline(partial, [result.step])
        write_record(record, partial)
    return Run(record=replace(record, path=out))


def lowered_function(request: FunctionRequest, topology: Topology) -> "FunctionProgram":
    """The function in StableHLO for the slice; SpecError if it does not trace or uses other devices."""
    devices = described_devices(topology)
    from meshscope.programs.jax.function import function_name, lower_function  # noqa: PLC0415  imports JAX

    program = lower_function(
        request.function,
        request.arguments,
        request.keywords,
        mesh=axis_sizes(request.mesh) if isinstance(request.mesh, str) else request.mesh,
        devices=devices,
        platform="tpu",
        name=request.name or function_name(request.function),
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


def _record(
    request: FunctionRequest,
    program: "FunctionProgram",
    compiled: CompiledFunction,
    result: FunctionResult,
) -> RunRecord:
    topology, phase = parse_topology(request.topology), result.step.time.phase
    experiment = function_record(request.function, program, topology, phase)
    place = experiment.function or program.name
    manifest = new_manifest(
        Source.COMPILED,
        experiment,
        ("meshscope.compile", place, topology.name),
        phases=[phase],
        versions=compiled.versions,
        seconds={f"{phase}.{name}": seconds for name, seconds in compiled.seconds.items()},
        others=result.step.others,
    )
    return RunRecord(
        path=None,
        manifest=manifest,
        rows=result.rows,
        memory={Source.COMPILED: result.memory},
        times=(result.step.time,),
    )


def function_record(
    function: Callable[..., Any], program: "FunctionProgram", topology: Topology, phase: Phase
) -> ExperimentRecord:
    """What a function, its mesh and its slice say about an experiment."""
    from meshscope.programs.jax.function import defined_at  # noqa: PLC0415  imports JAX

    return ExperimentRecord(
        model=NamedModel(name=program.name),
        function=defined_at(function) or program.name,
        mesh=dict(program.mesh),
        topology=topology,
        n_devices=prod(size for _, size in program.mesh),
        n_chips=topology.n_chips,
        phase=phase,
    )
