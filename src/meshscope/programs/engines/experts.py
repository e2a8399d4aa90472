"""Rewrites the weights of experts as tpu-inference does after loading them, on abstract arrays.

The engine's own code fuses the gate and up projections, and pads and shards them for its kernel.
"""

# pyright: reportMissingImports=false
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tpu_inference.layers.common.process_weights import moe_weights

GATE, UP, DOWN = PROJECTIONS = ("kernel_gating_EDF", "kernel_up_proj_EDF", "kernel_down_proj_EFD")
FUSED = ("kernel_gating_upproj_EDF", "kernel_down_proj_EFD")  # in the order of sharding
_SHARDING_KEYS = ("out_sharding", "sharding_names", "sharding")  # by release of flax


def process_experts(model: Any, mesh: Any) -> None:
    """Processes every layer with experts; for use under `nnx.eval_shape`."""
    shardings: list[Any] = []

    def recorded(array: Any, sharding: Any, **_: Any) -> Any:
        shardings.append(sharding)
        return array

    moe_weights.general_device_put = recorded
    jax.sharding.get_mesh = lambda: mesh  # JAX has none while it traces
    for _, module in nnx.iter_modules(model):
        if all(getattr(module, name, None) is not None for name in PROJECTIONS):
            shardings.clear()
            _process(module)
            for name, sharding in zip(FUSED, shardings, strict=True):
                _set_sharding(getattr(module, name), sharding.spec)


def _process(layer: Any) -> None:
    """Fuses the projections of one layer; checkpoints store [E, F, D] and, for down, [E, D, F]."""
    for name in PROJECTIONS:
        parameter = getattr(layer, name)
        parameter.set_metadata("_weights_to_load", [True])  # as after loading
        parameter.value = jnp.swapaxes(parameter.value, 1, 2)
    layer.quant_method.process_weights_after_loading(layer)


def _set_sharding(parameter: Any, spec: Any) -> None:
    for key in _SHARDING_KEYS:
        parameter.set_metadata(key, tuple(spec))
