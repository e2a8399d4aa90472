"""A user's function compiles for a slice, and its rows name the user's axes and lines."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.extend import backend as backend_of_jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope
from meshscope.api.compile import FunctionRequest, lowered_function
from meshscope.backends.compile import cache
from meshscope.backends.compile import function as backend
from meshscope.errors import CompileError
from meshscope.hardware.topology import parse_topology

pytestmark = [pytest.mark.slow, pytest.mark.tpu]

SLICE = "v6e:2x2"


def shape(*dims: int, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=spec)


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ up)
    return hidden @ down


def line_of(function: object, text: str) -> str:
    """The `file:line` of a line in a function."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + offset}"


ARGUMENTS = (
    shape(64, 256, spec=P("batch")),
    shape(256, 512, spec=P(None, "model")),
    shape(512, 256, spec=P("model")),
)


@pytest.fixture(scope="module")
def run() -> meshscope.Run:
    return meshscope.compile(mlp, *ARGUMENTS, topology=SLICE, mesh="batch=2,model=2")


def test_a_row_has_the_axis_of_the_users_mesh_and_the_users_line(run: meshscope.Run) -> None:
    (row,) = run.record.rows
    assert (row.kind, row.axis, row.phase, row.count) == ("all_reduce", "model", "step", 1)
    assert row.payload_bytes == 32 * 256 * 2  # half the batch in bf16
    assert row.inserted_by == "partitioner"
    assert row.source_line == line_of(mlp, "hidden @ down")
    assert row.axis_reason is None


def test_the_run_has_time_memory_and_tables(run: meshscope.Run, tmp_path: Path) -> None:
    assert run.time.step_s is not None
    assert run.time.prefill_s is None
    local = 32 * 256 + 256 * 256 + 256 * 256
    assert run.memory.argument_bytes == local * 2
    assert run.memory.weights_bytes is None
    assert run.memory.fits is True
    assert "all_reduce" in run.text(full=True)
    assert "test_compile_function.py" in run.text(full=True)
    assert "unattributed: none" in run.text(full=True)
    assert "mlp" in repr(run)
    assert run.report(tmp_path / "page.html").is_file()


def test_a_saved_run_opens_with_the_same_figures(run: meshscope.Run, tmp_path: Path) -> None:
    saved = meshscope.compile(
        mlp, *ARGUMENTS, topology=SLICE, mesh="batch=2,model=2", out=tmp_path / "mlp"
    )
    (opened,) = meshscope.open(tmp_path / "mlp")
    assert opened.time == saved.time == run.time
    assert opened.memory == run.memory
    assert opened.experiment.function is not None
    assert opened.experiment.mesh == {"batch": 2, "model": 2}
    assert (tmp_path / "mlp" / "hlo" / "step.hlo.txt.gz").is_file()
    assert meshscope.compare(run, opened).verdict == "equal"


def test_a_run_in_memory_is_saved_with_its_program(run: meshscope.Run, tmp_path: Path) -> None:
    saved = run.save(tmp_path / "mlp")
    assert (tmp_path / "mlp" / "hlo" / "step.hlo.txt.gz").is_file()
    assert saved.explain() == run.explain()


def test_every_kind_of_mesh_gives_the_same_collectives(run: meshscope.Run) -> None:
    mesh = AbstractMesh((2, 2), ("batch", "model"), axis_types=(AxisType.Auto,) * 2)
    on_mesh = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(ARGUMENTS, (P("batch"), P(None, "model"), P("model")), strict=True)
    ]
    for arguments, given in ((on_mesh, None), (on_mesh, mesh), (ARGUMENTS, mesh)):
        other = meshscope.compile(jax.jit(mlp), *arguments, topology=SLICE, mesh=given)
        assert other.collectives.equals(run.collectives)


def test_an_explicit_collective_is_that_of_the_program() -> None:
    mesh = AbstractMesh((4,), ("ring",))

    def summed(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "ring")

    mapped = jax.shard_map(summed, mesh=mesh, in_specs=P("ring"), out_specs=P())
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, P("ring")))
    (row,) = meshscope.compile(mapped, x, topology=SLICE, name="ring_sum").record.rows
    assert (row.kind, row.axis, row.inserted_by) == ("all_reduce", "ring", "program")
    assert row.source_line == line_of(summed, "psum")


def test_on_several_slices_a_row_says_whether_it_crosses_them() -> None:
    def mean(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint((x @ w).sum(0), P())

    arguments = (shape(64, 256, spec=P(("dcn", "dp"))), shape(256, 512, spec=P()))
    run = meshscope.compile(mean, *arguments, topology="2xv6e:2x2", mesh="dcn=2,dp=4")
    facts = [(row.kind, row.axis, row.group_size, row.crosses_slices) for row in run.record.rows]
    assert facts == [("all_reduce", "dp", 4, False), ("all_reduce", "dcn", 2, True)]


def test_code_that_asks_for_the_device_sees_the_target() -> None:
    seen: list[str] = []

    def asks(x: jax.Array) -> jax.Array:
        seen.append(f"{jax.default_backend()} {jax.devices()[0].device_kind}")
        return x * 2

    meshscope.compile(asks, shape(64, 256, spec=P("d")), topology=SLICE, mesh={"d": 4})
    assert seen == ["tpu TPU v6 lite"]
    assert jax.default_backend() == "cpu"


@pytest.mark.parametrize(("topology", "generation"), [("v6e:2x2", 6), ("v5e:2x2", 5)])
def test_a_library_of_kernels_finds_the_target_supported(topology: str, generation: int) -> None:
    """As tokamax 0.0.12 asks, in tokamax/_src/ops/op.py and pallas_mosaic_tpu.py."""

    def supported_on(device: jax.Device) -> bool:
        return device.platform == "tpu" and pltpu.get_tpu_info().generation == generation

    def kernel(x: jax.Array) -> jax.Array:
        device = backend_of_jax.get_default_device()
        if not supported_on(device):
            raise NotImplementedError(f"Not supported on {device.device_kind}.")
        return x * 2

    mesh = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))  # names no device
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("d")))
    assert meshscope.compile(kernel, x, topology=topology, mesh=mesh).time.step_s
    with pytest.raises(NotImplementedError, match="Not supported on cpu"):
        kernel(jnp.ones((8, 8)))


def test_an_unchanged_program_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if code of another line calls it; for another version of the compiler, it is another program."""

    def once(x: jax.Array) -> jax.Array:
        return x + 3

    x = shape(64, 256, spec=P("d"))
    first = meshscope.compile(once, x, topology=SLICE, mesh="d=4")
    monkeypatch.setattr(backend, "function_compiler", _refuse)
    second = meshscope.compile(once, x, topology=SLICE, mesh="d=4")
    assert second.time == first.time
    monkeypatch.setattr(cache, "version", lambda _name: "0.0.1")
    with pytest.raises(CompileError, match="compiled again"):
        meshscope.compile(once, x, topology=SLICE, mesh="d=4")


def _refuse(_: object) -> object:
    raise CompileError("compiled again")


def test_a_moved_line_of_the_function_is_another_program() -> None:
    """The rows name its lines, so the text of the old lines would be wrong."""

    def key(function: object) -> str:
        request = FunctionRequest(topology=SLICE, mesh="d=4")
        program = lowered_function(function, (shape(8, 8, spec=P("d")),), request)
        return backend.program_home(program, parse_topology(SLICE)).name

    first = key(lambda x: x + 7)
    assert key(lambda x: x + 7) != first
    moved, again = key(_grow), key(_grow)
    assert moved == again


@pytest.mark.parametrize("text", ["{", "[]", '{"seconds": {}}', '{"form": 2, "memory": {}}'])
def test_an_entry_that_is_damaged_or_of_another_version_is_compiled_again(text: str) -> None:
    def kept(x: jax.Array) -> jax.Array:
        return x + 4

    def compiled() -> meshscope.Run:
        return meshscope.compile(kept, shape(64, 256, spec=P("d")), topology=SLICE, mesh="d=4")

    first = compiled()
    (first.hlo.parent / cache.REPORT_NAME).write_text(text)
    assert compiled().time == first.time


def test_a_crash_of_the_compiler_is_a_message_and_the_next_program_compiles(monkeypatch) -> None:
    def grown() -> meshscope.Run:
        x = shape(8, 8, spec=P("d"))
        return meshscope.compile(_grow, x, topology=SLICE, mesh="d=4", name="grow")

    worker = backend.function_compiler().worker.process
    worker.kill()
    worker.wait()
    with monkeypatch.context() as patch:
        patch.setattr(backend.FunctionCompiler, "is_alive", True)  # it dies with the program
        with pytest.raises(CompileError, match="killed while compiling grow"):
            grown()
    assert grown().time.step_s is not None


def _grow(x: jax.Array) -> jax.Array:
    return x + 5


def broken(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w)


ZEROS = (np.zeros((8, 8)),)
UNEQUAL = (shape(8, 8, spec=P()), shape(16, 8, spec=P()))
SPLIT_BY_K = (shape(8, 8, spec=P("k")),)
ODD, UNKNOWN = ((shape(n, 256, spec=P(a)), *ARGUMENTS[1:]) for n, a in ((30, "d"), (64, "modle")))
NO_TRACE = r"does not trace: TypeError: dot_.*\n  .*py:\d+ in broken: return jnp.dot\(x, w\)$"
NO_DIVISOR = r"x has shape \(30, 256\), and d=4 does not divide its dimension 0. Pad 30 to 32"
NO_AXIS = "x is split over 'modle', which is no axis of the mesh. Did you mean 'model'"


@pytest.mark.parametrize(
    ("function", "arguments", "options", "message"),
    [
        (broken, UNEQUAL, {"mesh": "d=4"}, NO_TRACE),
        (mlp, ODD, {"mesh": "d=4"}, f"argument {NO_DIVISOR}"),
        (mlp, UNKNOWN, {"mesh": "batch=2,model=2"}, f"argument {NO_AXIS}"),
        (mlp, ARGUMENTS, {"mesh": "batch=2,model=4"}, "has 8 devices, and the slice has 4"),
        (mlp, ARGUMENTS, {"mesh": "batch:2"}, r"'batch:2' is not NAME=SIZE"),
        (mlp, ARGUMENTS, {"mesh": "d=2,d=4"}, r"mesh 'd=2,d=4': d appears twice. Give it once"),
        (_grow, ZEROS, {"mesh": AbstractMesh((4,), ("é",))}, r"axis 'é': the TPU compiler reads"),
        (_grow, ZEROS, {}, "for 1 device, and v6e:2x2 has 4. Give mesh='tp=4' or"),
        (_grow, ZEROS, {"mesh": AbstractMesh((4,), ("",))}, "axis '': a name is text"),
        (_grow, ZEROS, {"mesh": AbstractMesh((4,), (0,))}, "axis 0: a name is text"),
        (_grow, SPLIT_BY_K, {}, r"x is split by P\S*\('k',\), and there is no mesh"),
        (
            jax.pmap(_grow, axis_name="i"),
            ZEROS,
            {"mesh": "i=4"},
            "made by jax.pmap, .* jax.shard_map",
        ),
        (5, SPLIT_BY_K, {}, "'5' is a model, and only a function has further arguments"),
        (_grow, ZEROS, {"mesh": "d=4", "batch": 2}, "batch=2 is an option of a model"),
        (_grow, ZEROS, {"mesh": "d=4", "phase": "train"}, "phase: 'train' is not one of"),
        (_grow, ZEROS, {"mesh": "d=4", "topology": "cpu:4"}, "not a TPU slice"),
    ],
)
def test_bad_input_is_one_message(function, arguments, options, message) -> None:
    with pytest.raises(meshscope.MeshscopeError) as caught:
        meshscope.compile(function, *arguments, **{"topology": SLICE, **options})
    assert re.search(message, str(caught.value)), str(caught.value)


HALF, WHOLE = AbstractMesh((2,), ("k",)), AbstractMesh((4,), ("k",))


def _summed(mesh: Any, axis: str = "k") -> Callable[..., Any]:
    return jax.shard_map(lambda x: jax.lax.psum(x, "k"), mesh=mesh, in_specs=P(axis), out_specs=P())


def _split(mesh: Any) -> Callable[..., Any]:
    return jax.jit(_grow, in_shardings=P("k") if mesh is None else NamedSharding(mesh, P("k")))


@pytest.mark.parametrize(
    ("function", "x", "mesh", "message"),
    [
        (
            _split(HALF),
            *ZEROS,
            "k=4",
            "over 2 devices, and the slice has 4. Give shardings over all",
        ),
        (_split(HALF), *ZEROS, None, "is a program for 2 devices, .* Give shardings over all"),
        (_split(None), *ZEROS, "d=4", r"over 'k', which is no axis of the mesh \('d'\). Name one"),
        (_split(None), *ZEROS, None, "names axes, and there is no mesh. Give one"),
        (
            _summed(HALF),
            *ZEROS,
            "k=4",
            "mesh= has 'k': 4, and its shard_map 'k': 2. Give mesh= these",
        ),
        (_summed(WHOLE), *ZEROS, "d=2,e=2", "mesh= has 'd': 2, 'e': 2, and its shard_map 'k': 4"),
        (_summed(WHOLE, "d"), *ZEROS, "k=4", "in_specs refers to 'd'"),
    ],
)
def test_shardings_that_do_not_fit_the_mesh_get_the_remedy(function, x, mesh, message) -> None:
    """JAX's own words name neither mesh= nor the slice."""
    with pytest.raises(meshscope.MeshscopeError) as caught:
        meshscope.compile(function, x, topology=SLICE, mesh=mesh)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_shardings_without_devices_take_no_array_of_a_device() -> None:
    with pytest.raises(meshscope.MeshscopeError, match=r"an argument is an array. Give jax\.Shape"):
        meshscope.compile(_split(WHOLE), jnp.zeros((8, 8)), topology=SLICE)


@pytest.mark.parametrize("option", [{"mesh": "tp=8"}, {"name": "n"}, {"cache": False}])
def test_a_model_takes_no_option_of_functions(option: dict[str, object]) -> None:
    (name,) = option
    with pytest.raises(meshscope.MeshscopeError, match=f"{name}=.* is an option of a function"):
        meshscope.compile("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", **option)


@pytest.mark.parametrize("form", ["abstract", "sizes", "explicit"])
def test_a_function_may_name_its_own_abstract_mesh(form: str) -> None:
    kind = AxisType.Explicit if form == "explicit" else AxisType.Auto
    mesh = AbstractMesh((4,), ("k",), axis_types=(kind,))

    def total(x: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda x: jax.lax.psum(x, "k"), mesh=mesh, in_specs=P("k"), out_specs=P()
        )(x * 2)

    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, P("k")))
    request = FunctionRequest(topology=SLICE, mesh={"k": 4} if form == "sizes" else mesh)
    program = lowered_function(total, (x,), request)
    assert (program.n_devices, program.mesh) == (4, (("k", 4),))
