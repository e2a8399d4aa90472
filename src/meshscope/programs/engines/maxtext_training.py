"""MaxText's training step, as its `train_compile` lowers it: forward, backward and optimizer in one program.

State and batch are abstract. It was read in release 0.2.5.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from dataclasses import dataclass
from typing import Any

import jax
from flax.core.spmd import logical_axis_rules
from jax.sharding import AxisType, Mesh
from maxtext.common.common_types import ShardMode
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import maxtext_utils, sharding

from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.maxtext_step import configuration
from meshscope.programs.frontends import MODEL, EngineProgram, StepPrograms


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgram(EngineProgram):
    """The training step, which reads the rules of its configuration while it is traced."""

    config: Any

    def lower(self) -> Any:
        """Lowers the step to StableHLO."""
        with jax.set_mesh(self.mesh), logical_axis_rules(self.config.logical_axis_rules):
            return self.function.lower(*self.arguments)


def build_training(experiment: Experiment, devices: list[Any]) -> StepPrograms:
    """One step of `train_compile`, with its shardings, remat policy, optimizer and scanned layers."""
    workload = experiment.workload
    config = configuration(
        experiment,
        devices,
        base="base.yml",
        scan_layers=True,
        weight_dtype="float32",
        max_prefill_predict_length=min(workload.prompt, 64),
        max_target_length=workload.prompt,
    )
    mesh = _mesh(config, devices)
    arguments, _, state, _, graph = train_compile.get_shaped_inputs(mesh, config)
    params, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    function, placed, returned, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step,
        sharding.get_input_data_sharding(config, mesh),
        sharding.build_zero1_input_state_mesh_shardings(config, state, params),
        graph,
        config,
        params,
    )
    step = jax.jit(
        function,
        in_shardings=placed,
        out_shardings=returned,
        static_argnums=static,
        donate_argnums=donated,
    )
    program = TrainingProgram(function=step, arguments=arguments, mesh=mesh, config=config)
    return StepPrograms(programs={MODEL: program}, devices=list(mesh.devices.flat))


def _mesh(config: Any, devices: list[Any]) -> Mesh:
    """The mesh of `train_compile`, over the devices of the slice."""
    is_explicit = config.shard_mode == ShardMode.EXPLICIT
    kind = AxisType.Explicit if is_explicit else AxisType.Auto
    return Mesh(
        maxtext_utils.create_device_mesh(config, devices),
        config.mesh_axes,
        axis_types=(kind,) * len(config.mesh_axes),
    )
