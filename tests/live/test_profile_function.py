"""`meshscope.profile` runs a user's function here, and its rows are those of the compiled program."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope
from meshscope.errors import MeshscopeError
from meshscope.hardware.topology import slice_of_devices


def shape(*dims: int, spec: P, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=spec)


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ up)
    return hidden @ down


ARGUMENTS = (
    shape(32, 64, spec=P("batch")),
    shape(64, 128, spec=P(None, "model")),
    shape(128, 64, spec=P("model")),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> meshscope.Run:
    out = tmp_path_factory.mktemp("runs") / "mlp"
    return meshscope.profile(mlp, *ARGUMENTS, mesh="batch=2,model=4", steps=3, out=out)


def test_measured_rows_stand_beside_the_compiled_ones(saved: meshscope.Run) -> None:
    compiled, measured = saved.record.rows
    assert (compiled.source, measured.source) == ("compiled", "measured")
    for row in saved.record.rows:
        assert (row.kind, row.axis, row.phase, row.count) == ("all_reduce", "model", "step", 1)
        assert row.payload_bytes == 16 * 64 * 4
        line = int(row.source_line.rpartition(":")[2])
        assert Path(__file__).read_text().splitlines()[line - 1].strip() == "return hidden @ down"
    assert 0 < measured.dur_s < 10
    assert measured.time_basis == "measured"
    assert saved.compare().verdict == "equal"


def test_the_run_has_the_time_of_each_step_and_says_that_cores_are_shared(saved) -> None:
    (step_s,) = saved.record.measured.step_s.values()
    assert len(step_s) == 3
    assert saved.time.step_s == pytest.approx(sum(step_s) / 3)
    text = saved.text(full=True)
    assert "mlp on cpu:8" in text
    assert "profile: 4 steps, complete: every collective of every device" in text
    assert "virtual devices share the cores" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_saved_run_opens_with_the_same_figures(saved: meshscope.Run) -> None:
    assert saved.path is not None
    (opened,) = meshscope.open(saved.path)
    assert opened.time == saved.time
    assert opened.record.measured == saved.record.measured
    endings = {path.name.partition(".")[2] for path in (saved.path / "trace").iterdir()}
    assert endings == {"trace.json.gz", "xplane.pb", "parquet"}
    assert opened.report(saved.path / "page.html").is_file()
    (one,) = opened.explain()
    assert one.row.axis == "model"


def test_devices_in_another_order_have_the_axes_of_their_mesh() -> None:
    devices = np.array([0, 2, 1, 3])
    ordered = np.array(jax.devices())[devices].reshape(2, 2)
    mesh = Mesh(ordered, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(np.ones((4, 64), np.float32), NamedSharding(mesh, P("a", "b")))

    def summed(x: jax.Array) -> jax.Array:
        return x.sum(1)

    run = meshscope.profile(summed, x, steps=1)
    assert [row.axis for row in run.record.rows] == ["b", "b"]
    assert run.compare().verdict == "equal"
    assert run.experiment.topology.name == "cpu:4"


def test_donated_arrays_of_the_caller_are_kept() -> None:
    def update(state: jax.Array, change: jax.Array, factor: int) -> jax.Array:
        return state * factor + change

    @partial(jax.jit, donate_argnums=0)
    def add(state: jax.Array, change: jax.Array) -> jax.Array:
        return state + change

    state, change = jnp.ones(16), jnp.ones(16)
    for run in (
        meshscope.profile(update, state, change, keywords={"factor": 3}, steps=2),
        meshscope.profile(add, state, change, steps=2),
    ):
        assert run.time.step_s is not None
    assert state.sum() == 16


def test_integers_booleans_and_keys_become_random_data() -> None:
    def lookup(tokens: jax.Array, mask: jax.Array, key: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.where(mask[:, None], table[tokens], jax.random.normal(key, (8, 4)))

    run = meshscope.profile(
        lookup,
        jax.ShapeDtypeStruct((8,), jnp.int32),
        jax.ShapeDtypeStruct((8,), jnp.bool_),
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.ShapeDtypeStruct((128, 4), jnp.bfloat16),
        steps=1,
    )
    assert run.experiment.n_devices == 1
    assert run.record.rows == ()


def test_an_equinox_model_runs() -> None:
    model = eqx.nn.MLP(8, 8, 16, depth=1, key=jax.random.key(0))
    run = meshscope.profile(
        eqx.filter_jit(lambda m, x: jax.vmap(m)(x)), model, shape(8, 8, spec=P("dp")), mesh="dp=4"
    )
    assert run.time.step_s is not None


def _fails(x: jax.Array) -> jax.Array:
    raise ValueError(f"no such layer: {x}")


def _fails_at_run_time(x: jax.Array) -> jax.Array:
    def check(value: np.ndarray) -> np.ndarray:
        raise ValueError(f"not finite: {value}")

    return jax.pure_callback(check, jax.ShapeDtypeStruct((4,), jnp.float32), x)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "message"),
    [
        (mlp, ARGUMENTS, {"mesh": "batch=2,model=8"}, "has 16 devices, and JAX sees 8 here"),
        (mlp, ARGUMENTS, {"mesh": "batch=2,model=4", "steps": 0}, "steps=0 must be a whole"),
        (mlp, ARGUMENTS, {"mesh": "batch=2,model=4", "phase": "train"}, "is not one of"),
        (mlp, ARGUMENTS, {"mesh": "batch=2,model=4", "topology": "cpu:4"}, "has 4 devices"),
        (mlp, ARGUMENTS, {"mesh": "batch=2,modle=4"}, "Did you mean 'modle'"),
        (mlp, (shape(30, 64, spec=P("d")), *ARGUMENTS[1:]), {"mesh": "d=4"}, "Pad 30 to 32"),
        (_fails, (jnp.ones,), {}, "_fails does not trace: ValueError: no such layer"),
        (_fails_at_run_time, (np.ones(4, np.float32),), {}, "does not run here"),
    ],
)
def test_bad_input_is_one_message(function, arguments, options, message) -> None:
    with pytest.raises(MeshscopeError) as caught:
        meshscope.profile(function, *arguments, **options)
    assert message in str(caught.value)
    assert "site-packages" not in str(caught.value)


def test_an_existing_folder_is_kept(saved: meshscope.Run) -> None:
    with pytest.raises(MeshscopeError, match="force"):
        meshscope.profile(mlp, *ARGUMENTS, mesh="batch=2,model=4", steps=1, out=saved.path)


@pytest.mark.parametrize(
    ("kind", "coords", "name"),
    [
        ("TPU v6 lite", [(x, y, 0) for x in range(2) for y in range(4)], "v6e:2x4"),
        ("TPU v4", [(x, y, 0) for x in range(2) for y in range(2)], "v4:2x2x1"),
    ],
)
def test_tpu_devices_name_their_slice(kind, coords, name) -> None:
    devices = [SimpleNamespace(device_kind=kind, platform="tpu", coords=at) for at in coords]
    assert slice_of_devices(devices).name == name
    with pytest.raises(MeshscopeError, match="Give topology="):
        slice_of_devices([SimpleNamespace(device_kind="TPU v99", platform="tpu", coords=(0, 0, 0))])
