"""How a worker process builds the programs of each serving engine."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend
from meshscope.programs.engines.maxtext_preparation import prepare_maxtext
from meshscope.programs.engines.preparation import prepare_tpu_inference
from meshscope.programs.engines.sglang_preparation import prepare_sglang_jax


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A front end for an engine's model code.

    `prepare` sets environment variables and makes imports work. `module` imports the engine, so it is
    imported after `prepare`; its `build_step` returns an `EngineStep`. `packages` are those whose
    versions a run records beside JAX and libtpu.
    """

    prepare: Callable[[Experiment], None]
    module: str
    packages: tuple[str, ...]

    def builder(self, experiment: Experiment) -> Callable[..., Any]:
        """The function that builds a step from experiment, phase and devices."""
        self.prepare(experiment)
        return import_module(f"meshscope.programs.engines.{self.module}").build_step


ADAPTERS: dict[Frontend, Adapter] = {
    Frontend.VLLM_TPU: Adapter(
        prepare=prepare_tpu_inference,
        module="tpu_inference",
        packages=("tpu-inference", "flax"),
    ),
    Frontend.SGLANG_JAX: Adapter(
        prepare=prepare_sglang_jax,
        module="sglang_jax",
        packages=("sglang-jax", "flax"),
    ),
    Frontend.MAXTEXT: Adapter(
        prepare=prepare_maxtext,
        module="maxtext_step",
        packages=("maxtext", "flax"),
    ),
}
