"""Graphs of TorchXLA, and the interpreter that they run in."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshscope.backends.compile.import_hlo import compile_graph
from meshscope.errors import MissingToolError, ParseError, SpecError
from meshscope.hardware.topology import parse_topology
from meshscope.plans.mesh import Mesh
from meshscope.programs import environments
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import read_hlo

V6E_8 = parse_topology("v6e-8")

SAVING = """
import sys
import numpy as np
import torch
import torch_xla
import torch_xla.debug.profiler as xp
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xr.use_spmd()
mesh = xs.Mesh(np.arange(8), (2, 4), ("dp", "tp"))
device = torch_xla.device()
x, up, down = (torch.randn(shape, device=device) for shape in ((64, 256), (256, 1024), (1024, 256)))
xs.mark_sharding(x, mesh, ("dp", None))
xs.mark_sharding(up, mesh, (None, "tp"))
xs.mark_sharding(down, mesh, ("tp", None))
torch_xla.sync(wait=True)
with xp.Trace("decode"), xp.Trace("layer3"), xp.Trace("mlp"):
    y = torch.relu(x @ up) @ down
    xs.mark_sharding(y, mesh, ("dp", None))

graph = torch_xla._XLAC._get_xla_tensors_hlo_proto([y])
with open(sys.argv[1], "wb") as file:
    file.write(graph)
"""


def test_graph_of_the_user_becomes_rows(tmp_path: Path) -> None:
    """An MLP over dp=2,tp=4: one all-reduce over tp, with the scopes that the user opened."""
    pytest.importorskip(
        "torch_xla.core", reason="the extra 'torchxla' has an environment of its own"
    )
    proto, text = tmp_path / "graph.pb", tmp_path / "graph.hlo.txt.gz"
    subprocess.run([sys.executable, "-c", SAVING, str(proto)], check=True)

    versions: Mapping[str, str] = compile_graph(proto, V6E_8, text)

    mesh = Mesh(axes=(("dp", 2), ("tp", 4)))
    rows = module_collectives(read_hlo(text), mesh=mesh).rows()
    collectives = {(r.phase, r.layer, r.part, r.kind, r.axis, r.dtype, r.shape) for r in rows}
    assert collectives == {("decode", 3, "mlp", "all_reduce", "tp", "f32", (32, 256))}
    assert set(versions) == {"jax", "jaxlib", "libtpu"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"HloModule jit_f, entry", "is text, but a torch_xla graph is a proto.*Omit --frontend"),
        (None, "graph.pb: cannot be read"),
    ],
)
def test_what_is_no_graph_is_told(content: bytes | None, message: str, tmp_path: Path) -> None:
    proto = tmp_path / "graph.pb"
    if content is not None:
        proto.write_bytes(content)
    with pytest.raises(ParseError, match=message):
        compile_graph(proto, V6E_8, tmp_path / "text")


def test_damaged_graph_is_told(tmp_path: Path) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
    proto = tmp_path / "graph.pb"
    proto.write_bytes(b"\x0a\xff\xff no proto")
    with pytest.raises(ParseError, match=r"not an HLO proto that this XLA can read.*Save one with"):
        compile_graph(proto, V6E_8, tmp_path / "text")


def test_graph_is_compiled_for_tpu_alone(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'cpu:8' is not a TPU slice"):
        compile_graph(tmp_path / "graph.pb", parse_topology("cpu:8"), tmp_path / "text")


FITTING = {
    "python": "3.11.2",
    "torch": "2.9.0",
    "torch_xla": "2.9.0",
    "transformers": "5.1.0",
    "jax": "0.10.2",
    "libtpu": "0.0.42.1",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_xla": None}, r"needs torch_xla, not installed for .*MESHSCOPE_TORCHXLA_PYTHON"),
        ({"torch": "2.13.0+cpu"}, r"torch 2\.13\.0\+cpu is not the one.*Install torch==2\.9\.\*"),
        ({"transformers": "4.57.1"}, r"transformers 4\.57\.1 .*pip install"),
    ],
)
def test_what_does_not_fit_is_told(changes, message, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {name: v for name, v in (FITTING | changes).items() if v is not None}
    monkeypatch.setattr(environments, "installed_versions", lambda *_: versions)
    with pytest.raises(MissingToolError, match=message):
        environments.check_torchxla()


def test_what_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "installed_versions", lambda *_: FITTING)
    assert environments.check_torchxla() == FITTING


def test_a_python_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environments.TORCHXLA_VARIABLE, "/no/such/python")
    with pytest.raises(MissingToolError, match=r"'/no/such/python', does not run.*unset it"):
        environments.check_torchxla()
