"""A JAX function of the user on live devices: compiled with its arguments in place, timed and profiled."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshscope.errors import RunFailedError, SpecError
from meshscope.programs.jax import function as lowering
from meshscope.programs.jax.stablehlo import cost_analysis, memory_analysis

RANDOM_SCALE = 0.02  # standard deviation of random floats, as in most published initializers
LARGEST_RANDOM = 127  # random integer: a valid token that fits 8 bits
# Events are recorded when they end. On a busy machine, a thread may still be inside an event after
# its result is ready, and a profiler that stops immediately would lose that event.
DRAIN_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFunction:
    """A compiled function with its arguments on the devices."""

    program: lowering.FunctionProgram
    text: str
    memory: Mapping[str, int]
    costs: Mapping[str, float]
    devices: tuple[Any, ...]  # in the order of the program's groups
    seconds: Mapping[str, float]
    execute: Callable[[], float]  # runs a step: seconds from the launch until every result is ready


def local_devices(n_devices: int | None) -> list[Any]:
    """The first `n_devices` devices, or all; SpecError if there are fewer or several processes."""
    if jax.process_count() > 1:
        raise SpecError(
            f"profile runs in one process, and this is one of {jax.process_count()}. Use jax.profiler "
            "on every host, and meshscope import."
        )
    devices = jax.local_devices()
    if n_devices is not None and len(devices) < n_devices:
        raise SpecError(
            f"the mesh has {n_devices} devices, and JAX sees {len(devices)} here. For virtual CPU "
            f"devices call jax.config.update('jax_num_cpu_devices', {n_devices}) before JAX "
            "is used, or give a smaller mesh."
        )
    return devices[:n_devices]


def live_function(  # noqa: PLR0913  a function, its arguments and its mesh
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    mesh: Any,
    name: str,
    seed: int,
) -> LiveFunction:
    """The function compiled for local devices, with random data instead of shapes; SpecError or RunFailedError if it fails."""
    devices = local_devices(None if mesh is None else lowering.named_axes(mesh).n_devices)
    context = _concrete(lowering.mesh_of(mesh, devices), jax.local_devices())
    with lowering.in_mesh(context):
        call = lowering.FunctionCall(function, tuple(arguments), dict(keywords))
        lowering.check_divisible(call, name=name, mesh=context)
        call = lowering.jitted(_filled(call, context, seed))
        started = time.perf_counter()
        lowered = lowering.lowered_call(call, name=name, platform=jax.default_backend())
        program = lowering.function_program(lowered, name, context)
        lowered_at = time.perf_counter()
        compiled = _or_failed(f"{name} does not compile for the devices here", lowered.compile)
        compiled_at = time.perf_counter()
    inner = getattr(compiled, "compiled", compiled)  # flax.nnx wraps JAX's
    shardings = jax.tree.leaves(inner.input_shardings) + jax.tree.leaves(inner.output_shardings)
    meshes = [context, *(getattr(sharding, "mesh", None) for sharding in shardings)]
    whole = [m for m in meshes if isinstance(m, Mesh) and m.size == program.n_devices]
    in_order = whole[0].devices.flat if whole else jax.local_devices()[: program.n_devices]
    return LiveFunction(
        program=program,
        text=inner.as_text(),
        memory=memory_analysis(inner),
        costs=cost_analysis(inner),
        devices=tuple(in_order),
        seconds={"lower": lowered_at - started, "compile": compiled_at - lowered_at},
        execute=_step(call, compiled, inner, context, name),
    )


def run_profiled(live: LiveFunction, folder: Path, n_steps: int, label: str) -> None:
    """Runs steps under the profiler, each annotated; RunFailedError if another profile is running."""
    with profiling(folder):
        for number in range(n_steps):
            with jax.profiler.StepTraceAnnotation(label, step_num=number):
                live.execute()


@contextmanager
def profiling(folder: Path) -> Generator[None]:
    """Profiles the block; RunFailedError if another profile is running."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would be most of the events
    _or_failed(
        "the profiler does not start",
        lambda: jax.profiler.start_trace(str(folder), profiler_options=options),
    )
    try:
        yield
        time.sleep(DRAIN_S)
    finally:
        jax.profiler.stop_trace()


def _concrete(mesh: Any, devices: Sequence[Any]) -> Any:
    if mesh is None or (isinstance(mesh, Mesh) and set(mesh.devices.flat) <= set(devices)):
        return mesh
    array = np.array(local_devices(mesh.size), dtype=object).reshape(tuple(mesh.shape.values()))
    return Mesh(array, mesh.axis_names, axis_types=mesh.axis_types)


def _filled(call: lowering.FunctionCall, mesh: Any, seed: int) -> lowering.FunctionCall:
    leaves, tree = jax.tree.flatten(tuple(call[1:]))
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
    filled = [
        _random(leaf, key, mesh) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        for leaf, key in zip(leaves, keys, strict=False)
    ]
    return lowering.FunctionCall(call.function, *jax.tree.unflatten(tree, filled))


def _random(shape: jax.ShapeDtypeStruct, key: Any, mesh: Any) -> Any:
    sharding, dtype = shape.sharding, shape.dtype
    if isinstance(sharding, PartitionSpec):
        sharding = None if mesh is None else NamedSharding(mesh, sharding)
    elif isinstance(sharding, NamedSharding):
        mesh = _concrete(sharding.mesh, jax.local_devices())
        sharding = NamedSharding(mesh, sharding.spec)

    def made(key: Any) -> Any:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jax.random.split(key, shape.shape)
        if jnp.issubdtype(dtype, jnp.bool_):
            return jax.random.bernoulli(key, shape=shape.shape)
        if jnp.issubdtype(dtype, jnp.integer):
            most = min(LARGEST_RANDOM, jnp.iinfo(dtype).max)
            return jax.random.randint(key, shape.shape, 0, most + 1, jnp.int32).astype(dtype)
        return (RANDOM_SCALE * jax.random.normal(key, shape.shape)).astype(dtype)

    return jax.jit(made, out_shardings=sharding)(key)


def _step(call: Any, compiled: Any, inner: Any, mesh: Any, name: str) -> Callable[[], float]:
    """Runs the program once on the arguments in place; donated ones are copied first, untimed."""
    leaves, tree = jax.tree.flatten(tuple(call[1:]))
    # Static arguments are not arguments of the compiled program: JAX's own cache serves such calls.
    is_same = compiled is inner and tree == inner.in_tree
    run = compiled if is_same or compiled is not inner else call.function
    infos = jax.tree.leaves(inner.args_info, is_leaf=lambda value: hasattr(value, "donated"))
    donated = [False] * len(leaves)
    if is_same:
        donated = [info.donated for info in infos]
        shardings = jax.tree.leaves(inner.input_shardings, is_leaf=lambda one: one is None)
        leaves = [
            leaf if sharding is None else jax.device_put(leaf, sharding)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
    elif any(info.donated for info in infos):
        donated = [isinstance(leaf, jax.Array) for leaf in leaves]

    def execute() -> float:
        pairs = zip(leaves, donated, strict=True)
        copies = [jnp.copy(leaf) if is_donated else leaf for leaf, is_donated in pairs]
        positional, named = jax.tree.unflatten(tree, jax.block_until_ready(copies))
        with lowering.in_mesh(mesh):
            before = time.perf_counter()
            result = _or_failed(f"{name} does not run here", lambda: run(*positional, **named))
            jax.block_until_ready(result)
            return time.perf_counter() - before

    return execute


def _or_failed(what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # noqa: BLE001  the user's function may raise anything
        raise RunFailedError(lowering.failure_text(what, error)) from None
