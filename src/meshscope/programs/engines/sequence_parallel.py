"""Sequence parallelism around the projections of an engine's JAX model, as its torch models place it.

The JAX models of tpu-inference have no such option. Its torch models pass `enable_sp` to every linear
layer, which then asks for two shardings (tpu_inference/layers/vllm/quantization/configs.py): tokens split
over the mesh before a column-parallel projection, and behind a row-parallel one. The product between
them is the engine's own function for linear layers of torch models.
"""

# pyright: reportMissingImports=false
from math import prod
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_inference.layers.common.quantization.configs import QuantLinearConfig
from tpu_inference.layers.common.quantization.unquantized import UnquantizedLinearMethod
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.utils import TPU_SECOND_LAST_MINOR

_SHARDING_KEYS = ("out_sharding", "sharding_names", "sharding")  # by release of flax


def split_tokens(model: Any, mesh: Any) -> None:
    """Splits the tokens around every sharded projection of the layers."""
    modules: list[Any] = [module for _, module in nnx.iter_modules(model)]
    for module in modules:
        method = vars(module).get("quant_method")
        if isinstance(method, UnquantizedLinearMethod):
            module.quant_method = _SequenceParallelMethod(module, mesh)


class _SequenceParallelMethod:
    """Applies one projection with its tokens split over the tensor axis before it or behind it."""

    def __init__(self, layer: Any, mesh: Any) -> None:
        inputs, outputs = layer.einsum_str.replace(" ", "").split("->")
        _, weight = inputs.split(",")
        self.n_summed = sum(letter not in outputs for letter in weight)
        spec = _spec_of(layer.weight)
        axis = ShardingAxisName.MLP_TENSOR
        self.is_row = any(name is not None for name in spec[: self.n_summed])
        self.is_column = any(name is not None for name in spec[self.n_summed :])
        self.mesh = mesh
        self.tokens = NamedSharding(mesh, P(axis, None))
        config = QuantLinearConfig(
            enable_sp=True,
            output_sizes=[prod(layer.weight.shape[self.n_summed :])],
            weight_sharding=P(axis, None)
            if self.is_row
            else P(None, axis if self.is_column else None),
        )
        config.mesh = mesh
        self.method = UnquantizedLinearMethod(config)

    def apply_jax(self, layer: Any, x: jax.Array) -> jax.Array:
        """The product; few tokens stay whole, as in the engine."""
        n_tokens = x.shape[0]
        is_split = n_tokens // self.mesh.shape["model"] >= TPU_SECOND_LAST_MINOR
        x = x.reshape(n_tokens, -1)
        weight = layer.weight[...]
        free = weight.shape[self.n_summed :]
        if is_split and self.is_column:
            x = jax.lax.with_sharding_constraint(x, self.tokens)
        bias = None if layer.bias is None else layer.bias[...].reshape(-1)
        out = self.method._apply_fused(x, weight.reshape(x.shape[1], -1), bias)  # noqa: SLF001  the engine has no public one
        if is_split and self.is_row:
            out = jax.lax.with_sharding_constraint(out, self.tokens)
        return out.reshape(n_tokens, *free)


def _spec_of(weight: Any) -> tuple[Any, ...]:
    metadata = weight.get_metadata()
    spec = next((metadata[key] for key in _SHARDING_KEYS if metadata.get(key)), ())
    return tuple(spec)
