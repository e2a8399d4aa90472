"""Steps of serving engines, kept as HLO: `replayed` reads them without an engine.

Write one or all again with make_engine_steps.py.
"""

import gzip
import lzma
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import meshscope
from meshscope.plans.experiment import Experiment

FOLDER = Path(__file__).parent
LLAMA, QWEN, DEEPSEEK = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "deepseek-ai/DeepSeek-V3"
GPT_OSS, QWEN_MOE = "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B"
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


_SMALL_CHUNK = {"prefill_chunk": "1024"}
_FP8 = {"weight_dtype": "fp8", "cache_dtype": "fp8"}
CASES = {
    **{
        f"llama-{release}": Case(model=LLAMA, release=release)
        for release in ("0.12.0", "0.24.0", "0.32.0")
    },
    **{
        f"qwen-{release}": Case(model=QWEN, release=release)
        for release in ("0.12.0", "0.24.0", "0.32.0")
    },
    "qwen-0.32.0-fp8": Case(model=QWEN, release="0.32.0", options=_FP8),
    "qwen-0.32.0-sp": Case(model=QWEN, release="0.32.0", plan="tp=8,sp"),
    "gpt-oss-0.32.0": Case(
        model=GPT_OSS, release="0.32.0", plan="tp=8,ep=8", options={"dtype": "bf16"}
    ),
    "deepseek-0.32.0": Case(
        model=DEEPSEEK, release="0.32.0", plan="dp=8,ep=8", layers=4, options=_SMALL_CHUNK
    ),
    "qwen3-8b-0.32.0": Case(
        model="Qwen/Qwen3-8B",
        release="0.32.0",
        plan="tp=1",
        layers=None,
        topology="v6e-1",
        options={"batch": 8, "output": 1024, "prefill_chunk": "2048"},
    ),
    "qwen3-8b-0.32.0-tp4": Case(
        model="Qwen/Qwen3-8B",
        release="0.32.0",
        plan="tp=4",
        layers=None,
        topology="v6e-4",
        options={"batch": 32, "output": 1024, "prefill_chunk": "2048"},
    ),
    "llama-maxtext": Case(model=LLAMA, release="0.2.5", options={"frontend": "maxtext"}),
    "llama-maxtext-32": Case(
        model=LLAMA, release="0.2.5", layers=None, options={"frontend": "maxtext"}
    ),
    "mixtral-maxtext": Case(
        model="mistralai/Mixtral-8x7B-v0.1", release="0.2.5", options={"frontend": "maxtext"}
    ),
    "llama-sglang-main": Case(model=LLAMA, release="main", frontend=SGLANG),
    "qwen-sglang-0.0.2": Case(model=QWEN, release="0.0.2", frontend=SGLANG),
    "qwen-sglang-main": Case(model=QWEN, release="main", frontend=SGLANG),
    "qwen3-moe-sglang-main": Case(
        model=QWEN_MOE, release="main", frontend=SGLANG, plan="tp=8,ep=8"
    ),
    "qwen3-8b-sglang-main": Case(
        model="Qwen/Qwen3-8B",
        release="main",
        frontend=SGLANG,
        plan="tp=1",
        layers=None,
        topology="v6e-1",
        options={"batch": 8, "output": 1024, "prefill_chunk": "2048"},
    ),
    "qwen3-8b-sglang-main-tp4": Case(
        model="Qwen/Qwen3-8B",
        release="main",
        frontend=SGLANG,
        plan="tp=4",
        layers=None,
        topology="v6e-4",
        options={"batch": 32, "output": 1024, "prefill_chunk": "2048"},
    ),
    "llama-own": Case(model=LLAMA, release=None),
    "qwen-own": Case(model=QWEN, release=None),
    "qwen3-moe-own": Case(model=QWEN_MOE, release=None, plan="tp=8,ep=8"),
    "gpt-oss-own": Case(model=GPT_OSS, release=None, plan="tp=8,ep=8", options={"dtype": "bf16"}),
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
    api = import_module("meshscope.api.compile")
    backend = import_module("meshscope.backends.compile.compile")

    def copied(programs: Sequence[Any], *_: Any) -> tuple[str, ...]:
        for path in folder.glob("*.json"):
            shutil.copy(path, programs[0].folder)
        for path in folder.glob("*.xz"):
            text = gzip.compress(lzma.decompress(path.read_bytes()), 1)
            (programs[0].folder / path.name).with_suffix(".gz").write_bytes(text)
        return ()

    def with_release(experiment: Experiment, _: Any) -> Experiment:
        return replace(experiment, program=replace(experiment.program, engine_version=release))

    with (
        patch.object(backend, "_compile_programs", copied),
        patch.object(backend, "check_can_compile", _pass),
        patch.object(api, "check_can_compile", _pass),
        patch.object(api, "_with_engine_version", with_release),
    ):
        yield


def _pass(*_: object) -> None:
    """Neither engine nor compiler is needed."""
