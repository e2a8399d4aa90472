"""The readers under test: seeds, mutations that keep the syntax, and all that follows a reading."""

import gzip
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from mutations import Mutation, gzipped, protobuf_field, text_line

from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.profile.executions import executions
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.session import read_profile
from meshscope.spec.plan.mesh import Mesh

TESTS = Path(__file__).parents[1]
MESH = Mesh(axes=(("dp", 2), ("tp", 4)))


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads a damaged file at a path; a MeshscopeError is an answer, any other error a bug."""

    name: str
    ending: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[Path], object]
    structural: tuple[Mutation, ...] = ()


def _hlo_seeds() -> Sequence[bytes]:
    names = ("v5e_dp2tp4_prefill_scan", "v6e_several")
    folder = TESTS / "golden" / "hlo"
    return [gzip.decompress((folder / f"{n}.jax-0.10.2.txt.gz").read_bytes()) for n in names]


def _read_hlo(path: Path) -> None:
    for is_partial in (False, True):
        module = read_hlo(path, is_partial=is_partial)
        collectives_of(module, mesh=MESH, n_steps_of={}, crosses_slices=lambda _: None)


@cache
def _made() -> ModuleType:
    """The profiles that the tests of the reader write."""
    path = TESTS / "profile" / "made_profiles.py"
    spec = importlib.util.spec_from_file_location("made_for_fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _xplane_seeds() -> Sequence[bytes]:
    made = _made()
    chip = made.tpu(made.Event(made.REDUCE, 0, 400), made.Event(made.START, 400, 10))
    return [made.xspace(chip), made.xspace(*made.v6e_host()), made.xspace(made.gpu())]


def _read_xplane(path: Path) -> None:
    profile = read_profile(path)
    executions(profile.ops)
    capture_faults(profile, profile.ops)


READERS = (
    Reader(
        name="hlo",
        ending=".txt",
        seeds=_hlo_seeds,
        read=_read_hlo,
        structural=(text_line,),
    ),
    Reader(
        name="hlo-gzip",
        ending=".txt.gz",
        seeds=lambda: [gzip.compress(seed, 1) for seed in _hlo_seeds()[1:]],
        read=_read_hlo,
        structural=(gzipped(text_line),),
    ),
    Reader(
        name="xplane",
        ending=".xplane.pb",
        seeds=_xplane_seeds,
        read=_read_xplane,
        structural=(protobuf_field,),
    ),
)
