"""The front ends: what each one compiles, the Python that builds its programs, and how a worker builds them.

This registry is the only place that lists the front ends; `Frontend` in `plans/program.py` says what
plans and predictions need to know of their programs.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.plans.checks import check_program_format
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend, Program
from meshscope.programs.engines.engine_config import engine_variables_of
from meshscope.programs.engines.limits import check_engine
from meshscope.programs.engines.stubs import install_stubs
from meshscope.programs.environments import (
    Release,
    check_torchxla,
    check_tpu_compiler,
    installed_release,
    lone_variables,
    torchxla_python,
    torchxla_variables,
    tracing_variables,
)
from meshscope.programs.torchxla.configs import check_traceable

# The flags that torch_xla adds on a TPU host (torch_xla 2.9 __init__.py, _setup_libtpu_flags).
TORCH_XLA_FLAGS = (
    "--xla_tpu_use_enhanced_launch_barrier=false --xla_latency_hiding_scheduler_rerun=1 "
    "--xla_tpu_prefer_async_allgather_to_allreduce=true --xla_tpu_enable_flash_attention=false"
)

MODEL, SELECT, LOGITS, SAMPLE = "", "select", "logits", "sample"
STEP_PROGRAMS = (MODEL, SELECT, LOGITS, SAMPLE)  # a serving engine's, in order


def program_file(phase: str, name: str = "") -> str:
    """The HLO text of a phase's program; a step of several programs has a name for each."""
    return f"{phase}.{name}.hlo.txt.gz" if name else f"{phase}.hlo.txt.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProgram:
    """A jitted function of the engine and its abstract arguments, traced within a context."""

    function: Any
    arguments: tuple[Any, ...]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def lower(self) -> Any:
        """Lowers the function to StableHLO."""
        with self.context():
            return self.function.lower(*self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrograms:
    """The programs of one step by name, in their order, and the devices in the order of the mesh.

    `resident_bytes` counts a device's weights and caches, which all programs share.
    """

    programs: Mapping[str, Any]
    devices: list[Any]
    resident_bytes: int | None = None


Build = Callable[[Experiment, Phase, list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendAdapter:
    """A front end.

    `check` raises an error for an experiment that it cannot compile here. `interpreter` is the Python and
    the environment variables of its workers, which may use a scratch folder. In a worker, `builder` sets
    what the front end reads on import, imports it, and returns a function from an experiment, a phase
    and devices to `StepPrograms`; it takes the chunk of a prompt. A run records the versions of
    JAX, the compiler and `packages`. `implies_scopes`: the scopes of instructions follow
    from their names, as the front end enters none. `module` builds the programs of an engine.
    """

    check: Callable[[Experiment], None]
    interpreter: Callable[[Program, Path], tuple[str, dict[str, str]]]
    builder: Callable[[Experiment, int], Build]
    packages: tuple[str, ...] = ()
    implies_scopes: bool = False
    module: str | None = None


def frontend_of(experiment: Experiment) -> FrontendAdapter:
    """The front end of the experiment's program."""
    return FRONTENDS[experiment.program.frontend]


def check_can_compile(experiment: Experiment, compiler: Release | None = None) -> None:
    """Raises an error if the experiment cannot be compiled here, or not by another compiler."""
    check_program_format(experiment)
    if compiler is None:
        frontend_of(experiment).check(experiment)
        return
    name, topology = compiler.name, experiment.topology
    if not experiment.program.frontend.is_own:
        raise SpecError(
            f"--compiler {name} compiles programs of --frontend jax, and this is one of "
            f"{experiment.program.frontend}. Drop one of the two options."
        )
    if topology.chip.kind is not ChipKind.TPU:
        raise SpecError(
            f"--compiler {name} compiles for TPUs, and '{topology.name}' is no TPU slice. Use for "
            "example v6e-8, or drop --compiler."
        )


def _check_jax(experiment: Experiment) -> None:
    topology = experiment.topology
    if topology.chip.kind is not ChipKind.TPU:
        raise SpecError(
            f"'{topology.name}' is not a TPU slice; compile needs one, e.g. v6e-8. For GPUs and CPU devices use "
            "predict, run on them, or import the HLO that XLA dumps there."
        )
    check_tpu_compiler()


def _build_jax(_experiment: Experiment, chunk: int) -> Build:
    from meshscope.programs.jax.build import build_program  # noqa: PLC0415  imports JAX

    return _single(partial(build_program, chunk=chunk))


def _single(build_program: Callable[[Experiment, Phase, list[Any]], Any]) -> Build:
    return lambda experiment, phase, devices: StepPrograms(
        programs={"": build_program(experiment, phase, devices)}, devices=devices
    )


def _check_torchxla(experiment: Experiment) -> None:
    topology = experiment.topology
    if topology.chip.kind is not ChipKind.TPU:
        raise SpecError(
            f"'{topology.name}' is not a TPU slice; torch_xla programs compile only for TPUs, e.g. "
            "v6e-8. Omit --frontend for GPUs."
        )
    check_torchxla()
    check_traceable(experiment)


def _build_torchxla(experiment: Experiment, _chunk: int) -> Build:
    chip_flags = compiler_facts(experiment.topology.chip.name).torch_xla_flags.value
    flags = f"{os.environ['LIBTPU_INIT_ARGS']} {TORCH_XLA_FLAGS} {chip_flags}".rstrip()
    os.environ["LIBTPU_INIT_ARGS"] = flags
    os.environ.update(tracing_variables(experiment.topology.n_devices))
    from meshscope.programs.torchxla.program import build_program  # noqa: PLC0415  torch_xla before JAX

    return _single(build_program)


def _check_engine(experiment: Experiment) -> None:
    check_engine(experiment)
    installed_release(experiment.program.frontend, experiment.program.engine_version)


def _engine(  # noqa: PLR0913  what an engine needs
    module: str,
    package: str,
    *,
    missing: str,
    replaced: tuple[str, ...] = (),
    variables: Callable[[Experiment], Mapping[str, str]] = lambda _: {},
    implies_scopes: bool = False,
) -> FrontendAdapter:
    """An engine; `build_step` of `module`, which imports it, builds its programs.

    `variables` are environment variables. The packages named in `missing`, which the engine imports and its
    lowered programs do not use, become stubs, as do the engine's own modules in `replaced`.
    """

    def interpreter(program: Program, scratch: Path) -> tuple[str, dict[str, str]]:
        release = installed_release(program.frontend, program.engine_version)
        return release.python, lone_variables(scratch)

    def build(experiment: Experiment, _chunk: int) -> Build:  # chunks of a prompt run one program
        os.environ.update(variables(experiment))
        install_stubs(tuple(missing.split()), replaced=replaced)
        return import_module(f"meshscope.programs.engines.{module}").build_step

    return FrontendAdapter(
        check=_check_engine,
        interpreter=interpreter,
        builder=build,
        packages=(package, "flax"),
        implies_scopes=implies_scopes,
        module=module,
    )


FRONTENDS: Mapping[Frontend, FrontendAdapter] = {
    Frontend.JAX: FrontendAdapter(
        check=_check_jax,
        interpreter=lambda *_: (sys.executable, dict(os.environ)),
        builder=_build_jax,
    ),
    Frontend.TORCHXLA: FrontendAdapter(
        check=_check_torchxla,
        interpreter=lambda *_: (torchxla_python(), torchxla_variables()),
        builder=_build_torchxla,
        packages=("torch", "torch_xla", "transformers"),
    ),
    # Read in releases 0.24 and 0.32. The replaced modules are for vllm's own torch models, whose classes
    # derive from torch's and vllm's.
    Frontend.VLLM_TPU: _engine(
        "tpu_inference",
        "tpu-inference",
        missing=(
            "vllm torch torchax torchvision transformers safetensors huggingface_hub "
            "runai_model_streamer pathwaysutils tpu_info numba jaxtyping einops filelock regex tqdm requests"
        ),
        replaced=("tpu_inference.models.vllm", "tpu_inference.layers.vllm.quantization"),
        variables=engine_variables_of,
    ),
    Frontend.SGLANG_JAX: _engine(
        "sglang_jax",
        "sglang-jax",
        missing=(
            "transformers huggingface_hub safetensors modelscope tokenizers torch fastapi starlette uvicorn "
            "zmq orjson psutil pydantic requests tqdm jinja2 llguidance pybase64 pathwaysutils "
            "prometheus_client aiohttp yaml PIL partial_json_parser openai tiktoken pandas httpx uvloop "
            "setproctitle msgpack"
        ),
    ),
    # Tokenizers, checkpoints of other formats, and images (0.2.5).
    Frontend.MAXTEXT: _engine(
        "maxtext",
        "maxtext",
        missing=(
            "PIL drjax huggingface_hub jaxtyping jinja2 pathwaysutils sentencepiece sympy tiktoken "
            "tokenizers transformers"
        ),
        replaced=("maxtext.checkpoint_conversion", "maxtext.common.checkpointing"),
        variables=lambda _: {"DECOUPLE_GCLOUD": "TRUE"},  # no clients of Google Cloud
        implies_scopes=True,
    ),
}
