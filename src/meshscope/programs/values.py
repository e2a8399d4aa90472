"""Values for the arrays of a program: from a checkpoint's tensors, put on the devices shard by shard."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshscope.arch.model import Layer
from meshscope.errors import SpecError
from meshscope.plan.experiment import Experiment
from meshscope.plan.stages import stage_slots
from meshscope.plan.weights import Dim, Weight, layer_weights, outer_weights
from meshscope.programs.build import BuiltProgram

RANDOM_SCALE = 0.02  # the initializer_range of most published configs

ReadTensor = Callable[[str], np.ndarray]


def stored_weight(weight: Weight, tensor: np.ndarray, layer: int | None = None) -> np.ndarray:
    """The checkpoint's tensor in the shape in which the plan stores it.

    A matrix is transposed from [out, in]; KV heads repeat side by side until there is one a device;
    the vocabulary is padded with zeros; a tensor that holds several weights is cut. Where experts
    have tensors of their own, `tensor` is their stack.
    """
    value = np.swapaxes(tensor, -1, -2) if weight.is_transposed else tensor
    dims = list(weight.dims)
    shape = list(weight.shape)
    if weight.cut is not None:
        shape[-1] = weight.cut.whole
    if Dim.KV_HEADS in dims:
        at = dims.index(Dim.KV_HEADS)
        others = int(np.prod(shape)) // shape[at]
        n_heads, remainder = divmod(value.size, others)
        is_right = not remainder and n_heads > 0 and shape[at] % n_heads == 0
        _check_size(weight, tensor, layer, is_right=is_right)
        shape[at] = n_heads
        return np.repeat(value.reshape(shape), weight.shape[at] // n_heads, axis=at)
    if Dim.VOCAB in dims:
        at = dims.index(Dim.VOCAB)
        padding = [(0, 0)] * len(shape)
        padding[at] = (0, shape[at] - value.shape[at])
        _check_size(weight, tensor, layer, is_right=0 <= padding[at][1] < shape[at])
        return np.pad(value, padding)
    _check_size(weight, tensor, layer, is_right=value.size == int(np.prod(shape)))
    value = value.reshape(shape)
    cut = weight.cut
    return value if cut is None else value[..., cut.start : cut.stop : cut.step]


def _check_size(weight: Weight, tensor: np.ndarray, layer: int | None, *, is_right: bool) -> None:
    if not is_right:
        name = weight.checkpoint.format(layer=layer, expert="*")
        raise SpecError(
            f"tensor '{name}' has shape {list(tensor.shape)}, which does not make {weight.name} "
            f"{list(weight.shape)}. The checkpoint belongs to another config."
        )


def placed_weights(experiment: Experiment, program: BuiltProgram, read_tensor: ReadTensor) -> Any:
    """The weights of a program on its devices, read tensor by tensor."""
    model, plan = experiment.model, experiment.plan
    abstract = program.arguments[0]

    def placed(value: np.ndarray, like: Any) -> Any:
        array = value.astype(like.dtype)
        return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])

    def read(weight: Weight, layer: int | None) -> np.ndarray:
        return stored_weight(weight, _tensor(weight, layer, read_tensor), layer)

    weights: dict[str, Any] = {
        w.name: placed(read(w, None), abstract[w.name]) for w in outer_weights(model, plan)
    }
    if not program.is_stacked:
        weights["layers"] = [
            {
                w.name: placed(read(w, index), like[w.name])
                for w in layer_weights(model, plan, layer)
            }
            for index, (layer, like) in enumerate(
                zip(model.layers, abstract["layers"], strict=True)
            )
        ]
        return weights

    def stacked(weight: Weight, layer: Layer, like: Any) -> Any:
        """One layer after the other, put together on the devices: the host holds one tensor."""
        mesh, spec = like.sharding.mesh, like.sharding.spec
        one = jax.ShapeDtypeStruct(
            weight.shape, like.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec[1:]))
        )
        values = [
            placed(np.zeros(weight.shape) if index is None else read(weight, index), one)
            for index in stage_slots(model.layers, layer, plan.pp)
        ]
        return jax.jit(_stack, out_shardings=like.sharding)(values)

    weights["layers"] = {
        layer.name: {
            w.name: stacked(w, layer, abstract["layers"][layer.name][w.name])
            for w in layer_weights(model, plan, layer)
        }
        for layer in dict.fromkeys(model.layers)
    }
    return weights


def _stack(values: list[Any]) -> Any:
    return jnp.stack(values)


def _tensor(weight: Weight, layer: int | None, read_tensor: ReadTensor) -> np.ndarray:
    """The checkpoint's tensor; those of all experts stacked, where each has its own."""
    if "{expert}" not in weight.checkpoint:
        return read_tensor(weight.checkpoint.format(layer=layer))
    n_experts = weight.shape[weight.dims.index(Dim.EXPERT)]
    names = (weight.checkpoint.format(layer=layer, expert=index) for index in range(n_experts))
    return np.stack([read_tensor(name) for name in names])


def empty_cache(program: BuiltProgram) -> Any:
    """A cache of zeros on the program's devices."""
    return jax.tree.map(
        lambda like: jax.device_put(np.zeros(like.shape, like.dtype), like.sharding),
        program.arguments[2],
    )


def random_weights(program: BuiltProgram, *, seed: int) -> Any:
    """Random weights on the program's devices, made there, a leaf at a time: norms of one, others small.

    Every element is a hash of its own place, so that each device makes its share alone; copies agree.
    """
    leaves, structure = jax.tree.flatten_with_path(program.arguments[0])
    makers: dict[Any, Any] = {}
    made: list[Any] = []
    for index, (path, like) in enumerate(leaves):
        make = _ones if "norm" in str(path[-1]) else _hashed
        key = (make, like.shape, like.dtype, like.sharding)
        if key not in makers:
            bound = partial(make, shape=like.shape, dtype=like.dtype)
            makers[key] = jax.jit(bound, out_shardings=like.sharding)
        made.append(makers[key](np.uint32(seed * len(leaves) + index)))
    return jax.tree.unflatten(structure, made)


def _ones(_seed: Any, *, shape: tuple[int, ...], dtype: Any) -> Any:
    return jnp.ones(shape, dtype)


def _hashed(seed: Any, *, shape: tuple[int, ...], dtype: Any) -> Any:
    """Uniform in +-RANDOM_SCALE; the hash is lowbias32 (Chris Wellons, nullprogram.com/blog/2018/07/31)."""
    place, stride = jnp.full(shape, seed * np.uint32(0x9E3779B9), jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        steps = lax.broadcasted_iota(jnp.uint32, shape, dim)
        place = place + steps * np.uint32(stride % 2**32)
        stride *= shape[dim]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        place = (place ^ (place >> shift)) * np.uint32(factor)
    return ((place >> 8).astype(jnp.float32) * (RANDOM_SCALE / 2**23) - RANDOM_SCALE).astype(dtype)
