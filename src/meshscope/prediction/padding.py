"""Padding of weights and cache in the memory of a TPU: rows are whole multiples of 128 elements.

The compiler avoids it by another order of the dimensions, except where a program fixes the order: weights
that lookups and grouped matmuls read row by row, and the cache that the decode kernel reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from meshscope.hardware.chips import ChipKind
from meshscope.model.arrays import Weight
from meshscope.model.layers import Layer
from meshscope.model.mechanisms.attention import LANES
from meshscope.plans.caches import joined_narrow_heads, layer_cache
from meshscope.plans.context_form import cache_slots
from meshscope.plans.experiment import Experiment
from meshscope.plans.stages import stored_layers
from meshscope.plans.weights import layer_weights, outer_weights
from meshscope.units import DTYPE_BITS


def padding_bytes(experiment: Experiment) -> int:
    """Bytes of padding on one device; 0 except on TPUs."""
    if experiment.topology.chip.kind is not ChipKind.TPU:
        return 0
    model, plan = experiment.model, experiment.plan
    layers = stored_layers(model, plan.pp)
    weights = _weights_padding(experiment, outer_weights(model, plan))
    for layer, n_layers in layers.items():
        weights += n_layers * _weights_padding(experiment, layer_weights(model, plan, layer))
    has_kernel = experiment.kernels.decode_attention.kernel is not None
    return weights + (_cache_padding(experiment, layers) if has_kernel else 0)


def _weights_padding(experiment: Experiment, weights: Iterable[Weight]) -> int:
    """Padding of the weights whose last dimension is contiguous."""
    dtype = experiment.workload.weight_dtype
    return sum(
        _missing(weight.local_shape(experiment.plan)) * DTYPE_BITS[weight.stored_dtype(dtype)] // 8
        for weight in weights
        if weight.is_row_major
    )


def _cache_padding(experiment: Experiment, layers: Mapping[Layer, int]) -> int:
    """Padding of the cache as the decode kernel reads it."""
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    n_positions = cache_slots(plan, workload)
    bits = sum(
        n_layers
        * _missing(array.local_shape(plan))
        * array.n_slots(n_positions)
        * array.bits(workload.cache_dtype)
        for layer, n_layers in layers.items()
        for array in joined_narrow_heads(
            layer_cache(model, plan, layer, n_tokens=workload.decode_tokens)
        )
    )
    return bits * (workload.batch // plan.data_size) // 8


def _missing(shape: Sequence[int]) -> int:
    """Elements that fill the last dimension to a multiple of the lanes."""
    return prod(shape[:-1]) * (-shape[-1] % LANES)
