"""Processes the weights of tpu-inference's modules, as the engine does after loading.

The engine's own code splits, fuses, pads, quantizes and shards the weights of a checkpoint. It does so
on arrays of the host and of devices; here the same functions run while JAX traces them, and only the
shardings that they ask for are kept.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

PROJECTIONS = ("kernel_gating_EDF", "kernel_up_proj_EDF", "kernel_down_proj_EFD")
_SHARDING_KEYS = ("out_sharding", "sharding_names", "sharding")  # by release of flax
# Modules that place arrays, by functions that they import by name; not all of them in each release.
_MODULES = (
    "tpu_inference.layers.common.utils",
    "tpu_inference.layers.common.process_weights.linear_weights",
    "tpu_inference.layers.common.process_weights.moe_weights",
    "tpu_inference.layers.jax.quantization.fp8",
    "tpu_inference.layers.jax.quantization.unquantized",
    "tpu_inference.models.jax.utils.weight_utils",
    "tpu_inference.models.jax.deepseek_v3",
)


# An array, which keeps its id, and the sharding that the engine asks for, by this id.
Placements = dict[int, tuple[Any, P]]


def process_loaded(model: Any, mesh: Any) -> None:
    """Processes the weights of all modules; for use under `nnx.eval_shape`."""
    placements: Placements = {}
    jax.sharding.get_mesh = lambda: mesh  # JAX has none while it traces
    with _tracing(placements, mesh):
        for _, module in list(nnx.iter_modules(model)):
            attributes = vars(module)  # some of the modules answer to any name
            if "mla_layer" in attributes:
                _split_latent(module)
            elif all(attributes.get(name) is not None for name in PROJECTIONS):
                _process_experts(module)
            elif (
                attributes.get("weight") is not None and attributes.get("quant_method") is not None
            ):
                _process_linear(module)
    for _, module in nnx.iter_modules(model):
        for parameter in vars(module).values():
            if isinstance(parameter, nnx.Variable):
                array = parameter.get_value()
                _, spec = placements.get(id(array), (array, None))
                for key in _SHARDING_KEYS if spec is not None else ():
                    parameter.set_metadata(key, tuple(spec or ()))


def _process_linear(layer: Any) -> None:
    """Requantizes and reorders one matrix, if its method does so."""
    for parameter in vars(layer).values():
        if isinstance(parameter, nnx.Variable):
            parameter.set_metadata("_is_loaded", True)
    layer.quant_method.process_weights_after_loading(layer)


def _process_experts(layer: Any) -> None:
    """Fuses the projections of one layer; checkpoints store [E, F, D] and, for down, [E, D, F]."""
    for name, parameter in list(vars(layer).items()):
        if isinstance(parameter, nnx.Variable) and name.startswith(PROJECTIONS):
            stored = jnp.swapaxes(parameter.get_value(), 1, 2)
            parameter.set_value(stored)
            parameter.set_metadata("_weights_to_load", [stored])  # of all experts
    layer.quant_method.process_weights_after_loading(layer)


def _split_latent(projection: Any) -> None:
    """Splits `kv_b_proj` into key and value projections, as its loader does when all of it is there."""
    names = [n for n, value in vars(projection).items() if isinstance(value, nnx.Variable)]
    for name in names:
        # loads nothing: the parameter is abstract
        getattr(projection, name).set_metadata("weight_loader", lambda *_, **__: None)
    projection.load_weights([(name, None) for name in names])


@contextmanager
def _tracing(placements: Placements, mesh: Any) -> Generator[None]:
    """Replaces the engine's functions that touch devices while the block runs."""

    def put(array: Any, sharding: Any, *_: Any, **__: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            spec = sharding.spec
        else:
            spec = sharding if isinstance(sharding, P) else P(*(sharding or ()))
        for leaf in jax.tree.leaves(array):
            placements[id(leaf)] = (leaf, spec)
        return array

    stand_ins: dict[str, Any] = {
        "general_device_put": put,
        "shard_put": lambda x, shardings=(), *_, **__: put(x, shardings),
        "cpu_mesh": lambda: mesh,
        "cpu_mesh_context": nullcontext,
    }
    replaced: list[tuple[Any, str, Any]] = []
    for module in _modules():
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                replaced.append((module, name, getattr(module, name)))
                setattr(module, name, stand_in)
        if hasattr(module, "process_quantized_moe_weights"):
            process = module.process_quantized_moe_weights
            replaced.append((module, "process_quantized_moe_weights", process))
            module.process_quantized_moe_weights = _placing(process, put)
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def _placing(process: Callable[..., Any], put: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the shardings that it gives its results inside a jitted function."""
    weights_module = import_module("tpu_inference.layers.common.process_weights.moe_weights")

    def placed(weights: Any, *arguments: Any, **options: Any) -> Any:
        made = process(weights, *arguments, **options)
        shardings = weights_module._get_moe_weight_shardings(
            made, options["moe_backend"], options["mesh"]
        )
        for field in fields(made):
            array = getattr(made, field.name)
            if array is not None:
                put(array, getattr(shardings, field.name))
        return made

    return placed


def _modules() -> Iterator[Any]:
    for name in _MODULES:
        try:
            yield import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
