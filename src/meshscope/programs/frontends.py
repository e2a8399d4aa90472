"""The front ends: what each one compiles, the Python that builds its programs, and how a worker builds them.

This registry is the only place that lists the front ends; `Frontend` in `plans/program.py` says what
plans and predictions need to know of their programs.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.plans.checks import check_program_format
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend, Program
from meshscope.programs.engines.engine_config import check_engine, engine_variables_of
from meshscope.programs.engines.stubs import install_stubs
from meshscope.programs.environments import (
    Release,
    check_torchxla,
    check_tpu_compiler,
    compiler_of,
    installed_release,
    listed,
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
    from their names, as the front end enters none.
    """

    check: Callable[[Experiment], None]
    interpreter: Callable[[Program, Path], tuple[str, dict[str, str]]]
    builder: Callable[[Experiment, int], Build]
    packages: tuple[str, ...] = ()
    implies_scopes: bool = False


def frontend_of(experiment: Experiment) -> FrontendAdapter:
    """The front end of the experiment's program."""
    return FRONTENDS[experiment.program.frontend]


def compilable(
    experiment: Experiment, engine_version: str | None, compiler: str | None
) -> tuple[Experiment, Release | None]:
    """The experiment with the release of its engine, and the compiler; an error if it cannot be compiled here."""
    program = experiment.program
    if program.frontend.is_served:
        release = installed_release(program.frontend, engine_version)
        program = replace(program, engine_version=release.version)
        experiment = replace(experiment, program=program)
    elif engine_version is not None:
        raise SpecError(
            f"--engine-version {engine_version} changes nothing: --frontend {program.frontend} is no serving "
            "engine. Drop it."
        )
    chosen = compiler_of(compiler)
    check_can_compile(experiment, chosen)
    return experiment, chosen


def check_can_compile(experiment: Experiment, compiler: Release | None = None) -> None:
    """Raises an error if the experiment cannot be compiled here, or not by another compiler."""
    check_program_format(experiment)
    if compiler is None:
        frontend_of(experiment).check(experiment)
        return
    name = compiler.name
    if not experiment.program.frontend.is_own:
        raise SpecError(
            f"--compiler {name} compiles programs of --frontend jax, and this is one of "
            f"{experiment.program.frontend}. Drop one of the two options."
        )
    experiment.topology.check_tpu(f"--compiler {name} compiles only for TPUs")


def _check_jax(experiment: Experiment) -> None:
    experiment.topology.check_tpu(
        "compile needs one, e.g. v6e-8",
        "For GPUs and CPU devices use predict, run on them, or import the HLO that XLA dumps there.",
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
    programs = "torch_xla programs compile only for TPUs, e.g. v6e-8"
    experiment.topology.check_tpu(programs, "Omit --frontend for GPUs.")
    check_torchxla()
    check_traceable(experiment)


def _build_torchxla(experiment: Experiment, _chunk: int) -> Build:
    chip_flags = compiler_facts(experiment.topology.chip.name).torch_xla_flags
    flags = f"{os.environ['LIBTPU_INIT_ARGS']} {TORCH_XLA_FLAGS} {chip_flags}".rstrip()
    os.environ["LIBTPU_INIT_ARGS"] = flags
    os.environ.update(tracing_variables(experiment.topology.n_devices))
    from meshscope.programs.torchxla.program import build_program  # noqa: PLC0415  torch_xla before JAX

    return _single(build_program)


def _check_engine(experiment: Experiment) -> None:
    check_engine(experiment)
    installed_release(experiment.program.frontend, experiment.program.engine_version)


def _engine(
    *,
    module: str,
    package: str,
    missing: Sequence[str],
    replaced: Sequence[str] = (),
    implies_scopes: bool = False,
) -> FrontendAdapter:
    """An engine, by its row of `environments.toml`."""

    def interpreter(program: Program, scratch: Path) -> tuple[str, dict[str, str]]:
        release = installed_release(program.frontend, program.engine_version)
        return release.python, lone_variables(scratch)

    def build(experiment: Experiment, _chunk: int) -> Build:  # chunks of a prompt run one program
        os.environ.update(engine_variables_of(experiment))
        install_stubs(missing, replaced=replaced)
        return import_module(f"meshscope.programs.engines.{module}").build_step

    return FrontendAdapter(
        check=_check_engine,
        interpreter=interpreter,
        builder=build,
        packages=(package, "flax"),
        implies_scopes=implies_scopes,
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
    **{Frontend(name): _engine(**row) for name, row in listed("adapters").items()},
}
