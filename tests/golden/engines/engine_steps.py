"""Steps of serving engines, kept as HLO: `replayed` reads them without an engine.

Write one or all again with make_engine_steps.py.
"""

import gzip
import json
import lzma
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import meshscope

FOLDER = Path(__file__).parent
SGLANG = "sglang-jax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A compiled program pair, decode and prefill; `release` is None for meshscope's own."""

    model: str
    release: str | None
    plan: str = "tp=8"
    layers: int | None = 2
    topology: str = "v6e-8"
    frontend: str = "vllm-tpu"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `meshscope.compile`."""
        engine = {"frontend": self.frontend, "engine_version": self.release}
        return {
            "model": self.model,
            "topology": self.topology,
            "plan": self.plan,
            "layers": self.layers,
            "batch": 64,
            "prompt": 1024,
            "output": 128,
            **({} if self.release is None else engine),
            **self.options,
        }


CASES = {
    name: Case(**fields)
    for name, fields in json.loads((FOLDER / "engine_steps.json").read_text()).items()
}


def replayed(name: str, out: Path) -> meshscope.Run:
    """The run of a case in the folder `out`, read again from its stored HLO."""
    case = CASES[name]
    with _stored_programs(FOLDER / name, case.release):
        return meshscope.compile(**case.arguments, out=out)


def hlo_text(name: str, program: str) -> str:
    """The HLO of a program of a case, such as decode."""
    return lzma.decompress((FOLDER / name / f"{program}.hlo.txt.xz").read_bytes()).decode()


@contextmanager
def _stored_programs(folder: Path, release: str | None) -> Generator[None]:
    """Takes compiled programs from the folder instead of the compiler."""
    frontends = import_module("meshscope.programs.frontends")
    backend = import_module("meshscope.backends.compile.compile")

    def copied(programs: Sequence[Any], *_: Any, compiled: Callable[[Any], None]) -> None:
        for path in folder.glob("*.json"):
            shutil.copy(path, programs[0].folder)
        for path in folder.glob("*.xz"):
            text = gzip.compress(lzma.decompress(path.read_bytes()), 1)
            (programs[0].folder / path.name).with_suffix(".gz").write_bytes(text)
        for phase in dict.fromkeys(program.phase for program in programs):
            compiled(phase)

    def installed(*_: Any) -> SimpleNamespace:
        return SimpleNamespace(version=release)

    with (
        patch.object(backend, "_run_workers", copied),
        patch.object(frontends, "check_can_compile", lambda *_: None),
        patch.object(frontends, "installed_release", installed),
    ):
        yield
