"""Fills the arrays of a program on its devices, from a checkpoint or at random."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshscope.model.arrays import SCALE_SUFFIX, Dim, Weight
from meshscope.model.layers import Layer
from meshscope.model.quantization import values_dtype
from meshscope.plans.experiment import Experiment
from meshscope.plans.stages import stage_slots
from meshscope.plans.weights import layer_weights, outer_weights, reshaped
from meshscope.programs.jax.build import JAX_DTYPES, BuiltProgram
from meshscope.programs.jax.matrix import EXPONENT_BIAS, encoded, shared_exponents

TABLE = "router_table"  # the weight that contains expert IDs
RANDOM_SCALE = 0.02  # the initializer_range of most published configs
RANDOM_LARGEST = 127  # of 8-bit values, which are multiplied by float32 scales
LARGEST_INT4 = 7  # with bfloat16 scales
RANDOM_EXPONENT = EXPONENT_BIAS - 8  # of mxfp4, whose largest number is then 6 / 256
RANDOM_FP8_EXPONENT = EXPONENT_BIAS - 12  # of fp8, whose largest number is then 127 / 4096
FP8_SCALE = f"{SCALE_SUFFIX} of fp8"

ReadTensor = Callable[[str], np.ndarray]


def stored_weight(weight: Weight, tensor: np.ndarray, layer: int | None = None) -> np.ndarray:
    """Converts a checkpoint tensor to the shape that the plan stores.

    Matrices are transposed from [out, in]; adjacent copies of KV heads give each device one; the
    vocabulary and tables are padded with zeros; a tensor of several weights is sliced. If each expert has its own
    tensor, `tensor` is their stack.
    """
    name, columns = weight.checkpoint.format(layer=layer, expert="*", part="*"), weight.columns
    shape = reshaped(weight, tensor.shape, name)
    value = (np.swapaxes(tensor, -1, -2) if weight.is_transposed else tensor).reshape(shape)
    if columns is not None:
        selection = slice(columns.start, columns.stop, columns.step)
        value = value[(..., selection, *(slice(None),) * (-1 - columns.dim))]
        if columns.is_flat:
            return value.reshape(weight.shape)
    for at, dim in enumerate(weight.dims):
        if dim is Dim.KV_HEADS:
            value = np.repeat(value, weight.shape[at] // value.shape[at], axis=at)
        elif dim in {Dim.VOCAB, Dim.TABLE}:
            padding = [(0, 0)] * len(shape)
            padding[at] = (0, weight.shape[at] - shape[at])
            value = np.pad(value, padding)
    return value


def placed_weights(experiment: Experiment, program: BuiltProgram, read_tensor: ReadTensor) -> Any:
    """Reads the weights of a program tensor by tensor and places them on its devices, where layers are stacked."""
    model, plan = experiment.model, experiment.plan
    abstract = program.arguments[0]

    def placed(value: np.ndarray, like: Any) -> Any:
        array = value.astype(like.dtype)
        return jax.make_array_from_callback(array.shape, like.format, lambda index: array[index])

    def arrays(weights: Iterable[Weight], likes: Any, layer: int | None = None) -> dict[str, Any]:
        return {
            name: placed(value, likes[name])
            for weight in weights
            for name, value in stored_values(weight, read_weight(weight, layer, read_tensor), dtype)
        }

    def stacked(layer: Layer, likes: Any) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        for weight in layer_weights(model, plan, layer):
            parts: dict[str, list[Any]] = {}
            for index in stage_slots(model.layers, layer, plan.pp):
                is_unused = index is None
                value = (
                    np.zeros(weight.shape) if is_unused else read_weight(weight, index, read_tensor)
                )
                for name, array in stored_values(weight, value, dtype):
                    like = likes[name]
                    spec = PartitionSpec(*like.sharding.spec[1:])
                    sharding = NamedSharding(like.sharding.mesh, spec)
                    like = jax.ShapeDtypeStruct(like.shape[1:], like.dtype, sharding=sharding)
                    parts.setdefault(name, []).append(placed(array, like))
            for name, of_layers in parts.items():
                whole[name] = jax.jit(jnp.stack, out_shardings=likes[name].format)(of_layers)
        return whole

    dtype = experiment.workload.weight_dtype
    weights = arrays(outer_weights(model, plan), abstract)
    if program.is_stacked:
        layers = dict.fromkeys(model.layers)
        weights["layers"] = {
            layer.name: stacked(layer, abstract["layers"][layer.name]) for layer in layers
        }
    else:
        weights["layers"] = [
            arrays(layer_weights(model, plan, layer), likes, index)
            for index, (layer, likes) in enumerate(
                zip(model.layers, abstract["layers"], strict=True)
            )
        ]
    return weights


def read_weight(weight: Weight, layer: int | None, read_tensor: ReadTensor) -> np.ndarray:
    """The value of a weight as the plan stores it; experts with tensors of their own are stacked."""
    name = weight.checkpoint.format(layer=layer, expert="{expert}", part="{part}")
    if weight.n_tensors > 1:
        parts = [read_tensor(name.format(part=part)) for part in range(weight.n_tensors)]
        return stored_weight(weight, np.concatenate(parts), layer)
    if "{expert}" not in name:
        return stored_weight(weight, read_tensor(name), layer)
    experts = range(weight.shape[weight.dims.index(Dim.EXPERT)])
    tensors = [read_tensor(name.format(expert=expert)) for expert in experts]
    return stored_weight(weight, np.stack(tensors), layer)


def stored_values(
    weight: Weight, value: np.ndarray, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays that store `value` [*weight.shape]: the values and, if quantized, their scales.

    The largest value of each output channel, or block, becomes the largest number of the dtype (mxfp4: `shared_exponents`).
    """
    scale = weight.scale(dtype)
    if scale is None:
        yield weight.name, value
        return
    wide, quantization = value.astype(np.float32), weight.quantization(dtype)
    if quantization is not None and quantization.codes_dtype is not None:
        exponents = shared_exponents(_group_maxima(weight, np.abs(wide), scale))
        yield weight.name, encoded(wide, _of_group(weight, exponents))
        yield scale.name, exponents
        return
    stored = JAX_DTYPES[values_dtype(dtype)]
    is_integer = jnp.issubdtype(stored, jnp.integer)
    largest = float((jnp.iinfo if is_integer else jnp.finfo)(stored).max)

    is_exponent = scale.dtype == "u8"

    def rounded(scales: np.ndarray) -> np.ndarray:
        if is_exponent:  # the next power of two
            return np.exp2(np.ceil(np.log2(np.where(scales == 0, 1, scales))))
        return scales.astype(JAX_DTYPES[scale.dtype or dtype]).astype(np.float32)

    if quantization is not None and quantization.has_groups:
        scales = rounded(_group_maxima(weight, np.abs(wide), scale) / largest)
        factors = _of_group(weight, scales)
    elif quantization is None or quantization.square_block is None:
        magnitudes = np.abs(wide).max(axis=weight.inputs, keepdims=True)
        factors = scales = rounded(magnitudes / largest)
    else:
        block = quantization.square_block
        sizes = [prod(weight.shape[i] for i in group) for group in weight.matrix_dims]
        padding = [(0, 0), *((0, -size % block) for size in sizes[1:])]
        padded = np.pad(np.abs(wide).reshape(sizes), padding)
        # [*experts, input blocks, block, output blocks, block]
        blocks = padded.reshape(sizes[0], -1, block, padded.shape[2] // block, block)
        scales = blocks.max(axis=(2, 4)) / largest
        scales = rounded(scales) if is_exponent else scales
        factors = scales.repeat(block, 1).repeat(block, 2)[:, : sizes[1], : sizes[2]]
        factors = factors.reshape(weight.shape)
    factors = np.where(factors == 0, 1, factors)
    yield weight.name, np.rint(wide / factors) if is_integer else wide / factors
    scales = np.where(scales == 0, 1, scales).reshape(scale.shape)
    yield scale.name, np.log2(scales) + EXPONENT_BIAS if is_exponent else scales


def _group_maxima(weight: Weight, values: np.ndarray, scale: Weight) -> np.ndarray:
    last, shape = max(weight.inputs), list(scale.shape)
    shape.insert(last + 1, -1)
    return values.reshape(shape).max(axis=last + 1)


def _of_group(weight: Weight, scales: np.ndarray) -> np.ndarray:
    last = max(weight.inputs)
    scales = scales.reshape(*weight.shape[:last], -1, *weight.shape[last + 1 :])
    return scales.repeat(weight.shape[last] // scales.shape[last], axis=last)


def random_weights(program: BuiltProgram, *, seed: int, n_experts: int | None = None) -> Any:
    """Generates random weights on the program's devices, leaf by leaf; norms are ones.

    An expert table has distinct IDs below `n_experts` for each token. JAX's numbers depend on the global index, so
    replicas agree.
    """
    leaves, structure = jax.tree.flatten_with_path(program.arguments[0])
    dtypes = {str(path): like.dtype for path, like in leaves}
    makers: dict[Any, Any] = {}
    values: list[Any] = []
    for index, (path, like) in enumerate(leaves):
        name = next((n for n in ("norm", SCALE_SUFFIX, TABLE) if n in str(path[-1])), "")
        is_fp8 = dtypes.get(str(path).replace(SCALE_SUFFIX, "")) == jnp.float8_e4m3fn
        name = FP8_SCALE if is_fp8 and name == SCALE_SUFFIX else name
        key = (name, like.shape, like.dtype, like.format)
        if key not in makers:
            bound = partial(
                _made, name=name, shape=like.shape, dtype=like.dtype, n_experts=n_experts
            )
            makers[key] = jax.jit(bound, out_shardings=like.format)
        values.append(makers[key](np.uint32(seed * len(leaves) + index)))
    return jax.tree.unflatten(structure, values)


def _made(seed: Any, *, name: str, shape: tuple[int, ...], dtype: Any, n_experts: Any) -> Any:
    if name == "norm":
        return jnp.ones(shape, dtype)
    key = jax.random.key(seed)
    if name in {SCALE_SUFFIX, FP8_SCALE}:
        largest = RANDOM_LARGEST if dtype == jnp.float32 else LARGEST_INT4
        exponent = RANDOM_FP8_EXPONENT if name == FP8_SCALE else RANDOM_EXPONENT
        is_exponent = dtype == jnp.uint8
        return jnp.full(shape, exponent if is_exponent else RANDOM_SCALE / largest, dtype)
    if name == TABLE:
        first = jax.random.randint(key, (*shape[:-1], 1), 0, n_experts, dtype)
        return (first + jnp.arange(shape[-1]) * (n_experts // shape[-1])) % n_experts
    largest = RANDOM_LARGEST if jnp.dtype(dtype).itemsize == 1 else RANDOM_SCALE
    largest = LARGEST_INT4 if dtype == jnp.int4 else largest
    return jax.random.uniform(key, shape, minval=-largest, maxval=largest).astype(dtype)
