"""Lowers a JAX function of the user to StableHLO for a slice, in the user's process.

The StableHLO names mesh axes, not devices, so the mesh of the function may consist of virtual CPU devices,
described TPU devices, or none (`AbstractMesh`). If the function or a library asks JAX for the devices
during tracing, it sees the slice's.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax._src import shard_map
from jax._src.config import include_full_tracebacks_in_locations, use_shardy_partitioner
from jax._src.interpreters import mlir
from jax._src.interpreters.pxla import get_prop_to_input_output
from jax._src.pallas.mosaic import tpu_info
from jax._src.source_info_util import is_user_filename
from jax.extend import backend, source_info_util
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from meshscope.errors import SpecError, nearest
from meshscope.plans.mesh import Mesh, parse_mesh
from meshscope.programs.jax.stablehlo import program_digest

MAX_FRAMES = 6  # of a user's traceback in a message
_SDY_AXIS = re.compile(r'"([^"]+)"=(\d+)')
_DYNAMIC = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)
_PACKAGE = Path(__file__).resolve().parents[2]
# What JAX says of shardings that do not fit the mesh, and what the user does about it.
_MISFITS = {
    r"AbstractMesh size: (\d+) does not match the device assignment size: (\d+)": (
        "its shardings are over {0} devices, and the slice has {1}. Give shardings over all of its devices."
    ),
    r"Resource axis: (\S+) of .* not found in mesh: \((.*?),?\)": (
        "it is split over '{0}', which is no axis of the mesh ({1}). Name one of these, or give another mesh=."
    ),
    r"requires a non-empty mesh in context|The context mesh cannot be empty": (
        "it names axes, and there is no mesh. Give one that has them, such as mesh='tp=8'."
    ),
    r"(?s)Received incompatible devices .*context mesh": (
        "its shardings or arrays name devices of this machine, and mesh= names devices of the slice. Leave mesh= out."
    ),
    r"Memory kinds passed to jax.jit does not match": (
        "its shardings name no devices, and an argument is an array. Give jax.ShapeDtypeStruct(x.shape, x.dtype)."
    ),
    r"context mesh AbstractMesh\((.*?), axis_types.* passed to shard_map \w+\((.*?), axis_types": (
        "mesh= has {0}, and its shard_map {1}. Give mesh= these axes, or leave it out."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionProgram:
    """A function in StableHLO for `n_devices`, with the options that JAX would give its compiler."""

    name: str
    stablehlo: bytes
    digest: str  # independent of the caller
    n_devices: int
    mesh: tuple[tuple[str, int], ...]  # axes, outermost first
    is_tupled: bool
    is_shardy: bool
    # Where the partitioner may choose a sharding that the function leaves open.
    propagates_to_parameters: tuple[bool, ...]
    propagates_to_outputs: tuple[bool, ...]
    compiler_options: Mapping[str, Any]


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function or of its type."""
    inner = inspect.unwrap(function)
    named = (getattr(one, "__name__", None) for one in (inner, getattr(inner, "func", None)))
    name = next(filter(None, named), None)
    return "function" if name == "<lambda>" else name or type(inner).__name__


def defined_at(function: Callable[..., Any]) -> str | None:
    """The `file:line` where a function is defined; None if it is not defined in a file."""
    inner = inspect.unwrap(function)
    inner = getattr(inner, "func", inner)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def lower_function(  # noqa: PLR0913  a function, its arguments and its target
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    mesh: Any,
    devices: Sequence[Any],
    name: str,
) -> FunctionProgram:
    """Traces and lowers the function for these devices; SpecError if it does not trace. `mesh` may be axis sizes by name."""
    context = mesh_of(mesh, devices)

    def placed(leaf: Any) -> Any:
        sharding = leaf._sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None  # noqa: SLF001
        if context is None or not isinstance(sharding, NamedSharding):
            return leaf
        if not _are_alike(sharding.mesh, context):
            return leaf
        return leaf.update(sharding=NamedSharding(context, sharding.spec))

    call = FunctionCall(function, *jax.tree.map(placed, (tuple(arguments), dict(keywords))))
    with target_devices(devices), in_mesh(context):
        check_divisible(call, name=name, mesh=context)
        lowered = lowered_call(jitted(call), name=name, platform="tpu")
    return function_program(lowered, name, context)


@contextmanager
def in_mesh(mesh: Any) -> Generator[None]:
    """Traces under a mesh, if there is one, with source lines of the function alone."""
    _exclude_libraries()
    with ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
            stack.enter_context(_any_device_kind())
        # The function's callers are not part of the program: it stays the same if they move.
        stack.enter_context(include_full_tracebacks_in_locations(False))
        yield


def _are_alike(mesh: Any, other: Any) -> bool:
    one, two = mesh.abstract_mesh, other.abstract_mesh
    return (one.shape_tuple, one.axis_types) == (two.shape_tuple, two.axis_types)


@contextmanager
def _any_device_kind() -> Generator[None]:
    """In the block, a mesh that the function names counts as the context's if only the device kind differs.

    `shard_map` refuses it, as the context has the devices of the slice, and an `AbstractMesh` or a mesh of CPU devices
    has others or none.
    """
    checks: Any = getattr(shard_map, "_shmap_checks", None)

    def checked(mesh: Any, *rest: Any) -> Any:
        context = get_abstract_mesh()
        is_own = mesh is not None and not context.empty and _are_alike(mesh, context)
        return checks(None if is_own else mesh, *rest)

    with ExitStack() if checks is None else mock.patch.object(shard_map, "_shmap_checks", checked):
        yield


def lowered_call(call: "FunctionCall", *, name: str, platform: str) -> Any:
    """The call as JAX lowers it; SpecError if the function does not trace."""
    try:
        traced = call.function.trace(*call.arguments, **call.keywords)
        return traced.lower(lowering_platforms=(platform,))
    except Exception as error:  # noqa: BLE001  the user's function may raise anything
        raise SpecError(failure_text(f"{name} does not trace", error)) from None


def named_axes(mesh: Any) -> Mesh:
    """The axes of a mesh of JAX, of sizes by name, or of text such as `dp=2,tp=4`; PlanError for a wrong name or size."""
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    sizes: Mapping[Any, int] = getattr(mesh, "shape", mesh)
    if other := [name for name in sizes if not isinstance(name, str) or not name]:
        raise SpecError(f"mesh axis {other[0]!r}: a name is text. Give the axis another name.")
    return Mesh(axes=tuple(sizes.items()))


def mesh_of(mesh: Any, devices: Sequence[Any]) -> Any:
    """The mesh to trace under; one without devices, or axis sizes, become a mesh of the slice's devices."""
    if mesh is None:
        return None
    named = named_axes(mesh)
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    if named.n_devices != len(devices):
        text = ",".join(f"{name}={size}" for name, size in named.axes)
        raise SpecError(
            f"the mesh {text} has {named.n_devices} devices, and the slice has {len(devices)}. "
            "Give a mesh of all devices of the slice."
        )
    is_abstract = isinstance(mesh, AbstractMesh)
    axis_types = mesh.axis_types if is_abstract else (AxisType.Auto,) * len(named.axes)
    array = np.array(devices, dtype=object).reshape(named.sizes)
    return jax.sharding.Mesh(array, named.names, axis_types=axis_types)


class FunctionCall(NamedTuple):
    """A function, jitted or not, and what to call it with."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


def jitted(call: FunctionCall) -> FunctionCall:
    """The function with its own `jit` if it has one; leaves that are not arrays become constants."""
    function, *values = call
    if hasattr(function, "trace"):
        return call
    if isinstance(function, FunctionType) and hasattr(function, "lower"):
        raise SpecError(
            f"{function_name(function)} is made by jax.pmap, which takes the devices of this machine. "
            "Write it with jax.shard_map over an axis, and give mesh=."
        )
    plain = getattr(function, "__wrapped__", function) if hasattr(function, "lower") else function
    leaves, tree = jax.tree.flatten(tuple(values))
    dynamic = [leaf for leaf in leaves if isinstance(leaf, _DYNAMIC)]
    if len(dynamic) == len(leaves):
        return call._replace(function=jax.jit(plain))

    def of_arrays(arrays: list[Any]) -> Any:
        given = iter(arrays)
        merged = [next(given) if isinstance(leaf, _DYNAMIC) else leaf for leaf in leaves]
        positional, named = jax.tree.unflatten(tree, merged)
        result = plain(*positional, **named)
        return [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, _DYNAMIC)]

    of_arrays.__name__ = function_name(function)
    return FunctionCall(jax.jit(of_arrays), (dynamic,), {})


def check_divisible(call: FunctionCall, *, name: str, mesh: Any) -> None:
    """SpecError for an argument whose sharding does not divide its shape, or names no axis of the mesh."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tuple(call[1:]))
    for path, leaf in leaves:
        spec, sizes = _spec_of(leaf, mesh)
        if spec and not sizes:
            raise SpecError(
                f"{name}: {_argument(call.function, path)} is split by {PartitionSpec(*spec)}, and there is no mesh. "
                "Give one that has its axes, such as mesh='tp=8'."
            )
        for dim, (size, axes) in enumerate(zip(getattr(leaf, "shape", ()), spec, strict=False)):
            names = (axes,) if isinstance(axes, str) else axes
            if not isinstance(names, tuple):  # not split, or left open
                continue
            if unknown := [axis for axis in names if axis not in sizes]:
                raise SpecError(
                    f"{name}: {_argument(call.function, path)} is split over '{unknown[0]}', which is no axis "
                    f"of the mesh. {nearest(unknown[0], list(sizes))}"
                )
            n = prod(sizes[axis] for axis in names)
            if size % n:
                text = ",".join(f"{axis}={sizes[axis]}" for axis in names)
                raise SpecError(
                    f"{name}: {_argument(call.function, path)} has shape {tuple(leaf.shape)}, and {text} does "
                    f"not divide its dimension {dim}. Pad {size} to {-(-size // n) * n}, or split "
                    "another dimension."
                )


def _spec_of(leaf: Any, mesh: Any) -> tuple[Sequence[Any], Mapping[str, int]]:
    # `sharding` of a shape would look its axes up in the mesh
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    sharding: Any = getattr(leaf, "_sharding" if is_shape else "sharding", None)
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.spec), sharding.mesh.shape
    if isinstance(sharding, PartitionSpec):
        return tuple(sharding), (get_abstract_mesh() if mesh is None else mesh).shape
    return (), {}


def _argument(function: Callable[..., Any], path: tuple[Any, ...]) -> str:
    """The argument `w1` or `params['w1']` as the function names it."""
    _, first, *rest = path
    name = getattr(first, "key", None)
    if name is None:
        try:
            names = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            names = []
        name = names[first.idx] if first.idx < len(names) else str(first.idx)
    return f"argument {name}{jax.tree_util.keystr(tuple(rest))}"


@cache  # JAX keeps what is registered until the process ends
def _exclude_libraries() -> None:
    """Leaves frames of this package, installed libraries and the standard library out of source lines."""
    folders = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    folders += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    for folder in dict.fromkeys((str(_PACKAGE), *folders)):
        source_info_util.register_exclusion(f"{folder}/")


def failure_text(what: str, error: Exception) -> str:
    """What went wrong, with the user's own frames, the innermost last.

    The first paragraph of the message, or the text around a traceback that it quotes, such as a callback's.
    """
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if is_user_filename(frame.filename)]
    lines = [f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-MAX_FRAMES:]]
    message = str(error)
    head, quoted, rest = message.partition("Traceback (most recent call last)")
    if quoted:
        message = f"{head.strip()} {rest.strip().splitlines()[-1]}"
    first, *more = message.strip().split("\n\n")
    if first.endswith(":"):  # what it announces
        first = "\n".join([first, *more[:2]])
    first = first.split("\nSee https", 1)[0][:1000] or "the error has no message"
    misfits = ((re.search(said, message), remedy) for said, remedy in _MISFITS.items())
    advice = next((remedy.format(*match.groups()) for match, remedy in misfits if match), None)
    return "\n".join([f"{what}: {advice or f'{type(error).__name__}: {first}'}", *lines])


def function_program(lowered: Any, name: str, context: Any = None) -> FunctionProgram:
    """The program that JAX lowered, in the mesh `context` or its shardings' meshes."""
    lowered = getattr(lowered, "lowered", lowered)  # flax.nnx wraps JAX's
    computation = lowered._lowering  # noqa: SLF001  JAX has no public name for the options
    arguments = computation.compile_args
    module = lowered.compiler_ir("stablehlo")
    n_devices = module.operation.attributes["mhlo.num_partitions"].value
    to_inputs, to_outputs = get_prop_to_input_output(
        arguments["in_shardings"], arguments["out_shardings"], len(arguments["ordered_effects"])
    )
    shardings = (*arguments["in_shardings"], *arguments["out_shardings"])
    return FunctionProgram(
        name=name,
        stablehlo=mlir.module_to_bytecode(module),
        digest=program_digest(module),
        n_devices=n_devices,
        mesh=_axes(context, shardings, module, n_devices),
        is_tupled=arguments["tuple_args"],
        is_shardy=use_shardy_partitioner.value,
        propagates_to_parameters=tuple(to_inputs),
        propagates_to_outputs=tuple(to_outputs),
        compiler_options=dict(computation._compiler_options_kvs),  # noqa: SLF001
    )


def _axes(
    context: Any, shardings: Iterable[Any], module: Any, n_devices: int
) -> tuple[tuple[str, int], ...]:
    """The mesh of all devices with the most axes; one axis `device` if the program names none."""
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    every = [tuple(mesh.shape.items()) for mesh in (context, *meshes) if mesh is not None]
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            axes = str(op.operation.attributes["mesh"])
            every.append(tuple((axis, int(size)) for axis, size in _SDY_AXIS.findall(axes)))
    whole = [axes for axes in every if prod(size for _, size in axes) == n_devices]
    named = [tuple(axis for axis in axes if axis[1] > 1) for axes in whole]
    return max(named, key=len, default=()) or (("device", n_devices),)


@contextmanager
def target_devices(devices: Sequence[Any]) -> Generator[None]:
    """In the block, JAX names these TPUs, and arrays stay where they would be.

    Libraries choose their kernels by `jax.devices()`, `jax.default_backend()`, the default device of
    `jax.extend.backend` (tokamax), or what Pallas knows of the TPU (`pltpu.get_tpu_info()`).
    """
    listed = mock.Mock(side_effect=lambda *_args, **_kwargs: list(devices))
    answers = {
        "devices": listed,
        "local_devices": listed,
        "device_count": mock.Mock(return_value=len(devices)),
        "local_device_count": mock.Mock(return_value=len(devices)),
        "default_backend": mock.Mock(return_value="tpu"),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(jax, **answers))
        first = mock.Mock(return_value=devices[0])
        stack.enter_context(mock.patch.object(backend, "get_default_device", first))
        stack.enter_context(_pallas_target(devices[0]))
        yield


@contextmanager
def _pallas_target(device: Any) -> Generator[None]:
    """Pallas describes this TPU; its cached answers are cleared before and after."""
    answers = {"get_device_kind": device.device_kind, "get_num_device_cores": device.num_cores}
    # Not every version of JAX has both functions.
    known = {n: mock.Mock(return_value=v) for n, v in answers.items() if hasattr(tpu_info, n)}

    def forget() -> None:
        for value in list(vars(tpu_info).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()

    with mock.patch.multiple(tpu_info, **known) if known else ExitStack():
        forget()
        try:
            yield
        finally:
            forget()
