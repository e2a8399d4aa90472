"""StableHLO of a user is compiled for a slice and read as other programs; what is none is one message."""

import gzip
import json
from pathlib import Path

import jax
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = [pytest.mark.slow, pytest.mark.tpu]
LAYOUT = ("--topology", "v6e-8", "--plan", "tp=8")
MESH = AbstractMesh((8,), ("tp",), (AxisType.Auto,))


def saved(form: str) -> bytes:
    """An MLP over tp=8: text, bytecode or a portable artifact."""

    def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ up) @ down

    shapes = (((16, 1024), P()), ((1024, 4096), P(None, "tp")), ((4096, 1024), P("tp", None)))
    arrays = [
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(MESH, spec))
        for shape, spec in shapes
    ]
    jitted = jax.jit(mlp, out_shardings=NamedSharding(MESH, P()))
    if form == "artifact":
        return export.export(jitted, platforms=["tpu"])(*arrays).mlir_module_serialized
    text = (
        jitted.trace(*arrays).lower(lowering_platforms=("tpu",)).as_text(debug_info=True).encode()
    )
    return gzip.compress(text) if form == "packed" else text


@pytest.mark.parametrize("form", ["text", "packed", "artifact"])
def test_a_saved_program_becomes_rows(meshscope, form: str) -> None:
    Path("step.mlir").write_bytes(saved(form))
    outcome = meshscope("import", "step.mlir", *LAYOUT, "--phase", "decode", "--json")
    assert outcome.status == 0, outcome.err
    (row,) = json.loads(outcome.out)["collectives"]
    assert (row["kind"], row["axis"], row["dtype"], row["shape"]) == (
        "all_reduce",
        "tp",
        "bf16",
        [16, 1024],
    )
    assert Path("runs/step-v6e-2x4-tp8/hlo/step.hlo.txt.gz").exists()


def test_what_cannot_be_compiled_is_one_message(meshscope) -> None:
    Path("step.mlir").write_bytes(saved("text"))
    for options, words in (
        (("--topology", "v6e-4", "--plan", "tp=4"), "lowered for 8 devices, and the slice has 4"),
        (("--topology", "h100:8", "--plan", "tp=8"), "StableHLO compiles only for TPUs"),
        ((), "need --topology"),
    ):
        status, _, err = meshscope("import", "step.mlir", *options)
        assert status == 1
        assert words in err
    deep = b"module @x { func.func @main() { " + b"scf.if %x {" * 20_000
    for name, content in (
        ("bad.mlir", b"module @x { func.func @main( }"),
        ("deep.mlir", deep),
        ("b.mlirbc", b"ML\xefR\x06x"),
    ):
        Path(name).write_bytes(content)
        status, _, err = meshscope("import", name, *LAYOUT)
        assert status == 1
        assert f"meshscope: {name}: " in err
    assert not Path("runs").exists()
