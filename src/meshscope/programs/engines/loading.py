"""Changes tpu-inference's modules after loading: weights processed, tokens split around projections.

The engine's own code splits, fuses, pads, quantizes and shards the weights of a checkpoint. It does so
on arrays of the host and of devices; here the same functions run while JAX traces them, and only the
shardings that they ask for are kept.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from importlib import import_module
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_inference import utils
from tpu_inference.layers.common.sharding import ShardingAxisName

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


def split_tokens(model: Any, mesh: Any) -> None:
    """Splits the tokens around every sharded projection of the layers, as the engine's torch models do.

    Its JAX models have no such option. Its torch models pass `enable_sp` to every linear layer, which then
    asks for two shardings (tpu_inference/layers/vllm/quantization/configs.py): tokens split over the mesh
    before a column-parallel projection, and after a row-parallel one. The product between them is the
    engine's own function for linear layers of torch models.
    """
    quantization = "tpu_inference.layers.common.quantization"
    method = import_module(f"{quantization}.unquantized").UnquantizedLinearMethod
    config = import_module(f"{quantization}.configs").QuantLinearConfig
    modules: list[Any] = [module for _, module in nnx.iter_modules(model)]
    for module in modules:
        if isinstance(vars(module).get("quant_method"), method):
            module.quant_method = _SequenceParallelMethod(
                module, mesh, method=method, config=config
            )


class _SequenceParallelMethod:
    """Applies one projection with its tokens split over the tensor axis before or after it."""

    def __init__(self, layer: Any, mesh: Any, *, method: Any, config: Any) -> None:
        inputs, outputs = layer.einsum_str.replace(" ", "").split("->")
        _, weight = inputs.split(",")
        self.n_summed = sum(letter not in outputs for letter in weight)
        metadata = layer.weight.get_metadata()
        spec = tuple(next((metadata[key] for key in _SHARDING_KEYS if metadata.get(key)), ()))
        axis = ShardingAxisName.MLP_TENSOR
        self.is_row = any(name is not None for name in spec[: self.n_summed])
        self.is_column = any(name is not None for name in spec[self.n_summed :])
        self.mesh = mesh
        self.tokens = NamedSharding(mesh, P(axis, None))
        made = config(
            enable_sp=True,
            output_sizes=[prod(layer.weight.shape[self.n_summed :])],
            weight_sharding=P(axis, None)
            if self.is_row
            else P(None, axis if self.is_column else None),
        )
        made.mesh = mesh
        self.method = method(made)

    def apply_jax(self, layer: Any, x: jax.Array) -> jax.Array:
        """The product; few tokens stay whole, as in the engine."""
        n_tokens = x.shape[0]
        is_split = n_tokens // self.mesh.shape["model"] >= utils.TPU_SECOND_LAST_MINOR
        x = x.reshape(n_tokens, -1)
        weight = layer.weight[...]
        free = weight.shape[self.n_summed :]
        if is_split and self.is_column:
            x = jax.lax.with_sharding_constraint(x, self.tokens)
        bias = None if layer.bias is None else layer.bias[...].reshape(-1)
        out = self.method._apply_fused(x, weight.reshape(x.shape[1], -1), bias)
        if is_split and self.is_row:
            out = jax.lax.with_sharding_constraint(out, self.tokens)
        return out.reshape(n_tokens, *free)
