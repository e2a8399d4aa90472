"""Memory that a plan needs on one device, from closed formulas."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from meshscope.hardware.chips import ChipKind
from meshscope.model.arrays import Weight
from meshscope.model.layers import Layer
from meshscope.model.mechanisms.attention import LANES
from meshscope.plans.caches import cache_slots, device_cache_bytes, joined_narrow_heads, layer_cache
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import Memory, TempBasis
from meshscope.plans.program import Engine
from meshscope.plans.stages import stage_layers, stored_layers
from meshscope.plans.weights import device_weight_bytes, layer_bytes, layer_weights, outer_weights
from meshscope.prediction.temporaries import TempEstimate, temp_estimate
from meshscope.prediction.vllm_engine import stored_vocab
from meshscope.units import DTYPE_BITS


def predicted_memory(experiment: Experiment) -> Memory:
    """Memory of one device in bytes; in a pipeline, of a device in the largest stage.

    Meshscope's pipeline is one program for all stages, so each stage allocates the largest number
    of layers of each kind that any stage has, plus embedding and head. A vLLM stage allocates only
    its own layers.

    Padding and temporary buffers are estimated for programs with formulas (`prediction.temporaries`). `fits` is
    True if the high end of the estimate fits, False if weights, cache and the low end do not.
    """
    weights_bytes, kv_cache_bytes = _resident_bytes(experiment)
    hbm_bytes, temp = experiment.topology.chip.device_hbm_bytes, temp_estimate(experiment)
    padding = padding_bytes(experiment) if temp is not None else None
    known_bytes = weights_bytes + kv_cache_bytes + (padding or 0)
    is_assumed = experiment.workload.weight_dtype == experiment.model.assumed_dtype
    fits = None if hbm_bytes is None else _fits(known_bytes, temp, hbm_bytes)
    return Memory(
        weights_bytes=weights_bytes,
        kv_cache_bytes=kv_cache_bytes,
        temp_bytes=None if temp is None else temp.value_bytes,
        total_bytes=None if temp is None else known_bytes + temp.value_bytes,
        hbm_bytes=hbm_bytes,
        fits=None if is_assumed and not fits else fits,
        temp_low_bytes=None if temp is None else temp.low_bytes,
        temp_high_bytes=None if temp is None else temp.high_bytes,
        temp_basis=None if temp is None else TempBasis.ESTIMATE,
        padding_bytes=padding,
        has_assumed_weights=is_assumed,
    )


def _fits(known_bytes: int, temp: TempEstimate | None, hbm_bytes: int) -> bool | None:
    """Whether all of the interval fits, or none of it; None between."""
    if known_bytes + (0 if temp is None else temp.low_bytes) > hbm_bytes:
        return False
    return True if temp is not None and known_bytes + temp.high_bytes <= hbm_bytes else None


def _resident_bytes(experiment: Experiment) -> tuple[int, int]:
    """Bytes of weights and of cache on one device, or on a device of the largest stage."""
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    if experiment.engine is Engine.MESHSCOPE:
        weights_bytes = device_weight_bytes(model, plan, workload.weight_dtype)
        return weights_bytes, device_cache_bytes(
            model, plan, workload, layout=experiment.cache_layout
        )
    stages = enumerate(stage_layers(model.n_layers, plan.pp))
    return max((_stage_bytes(experiment, stage, layers) for stage, layers in stages), key=sum)


def _stage_bytes(experiment: Experiment, stage: int, indices: range) -> tuple[int, int]:
    """Bytes of weights and of cache on a vLLM worker of this stage.

    The first stage holds the embedding, the last one the final norm and the head. If the head is
    tied to the embedding, the last stage holds a copy of the embedding.
    """
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    model = replace(model, vocab=stored_vocab(model))
    is_first, is_last = stage == 0, stage == plan.pp - 1
    embed, norm, *head = outer_weights(model, plan)
    layers = model.layers[indices.start : indices.stop]
    weights: list[Weight] = []
    if is_first or (is_last and model.has_tied_embeddings):
        weights.append(embed)
    if is_last:
        weights += [norm, *head]
    dtype = workload.weight_dtype
    weights_bytes = sum(weight.local_bytes(plan, dtype) for weight in weights)
    weights_bytes += sum(layer_bytes(model, plan, layer, dtype) for layer in layers)
    cache_bytes = device_cache_bytes(model, plan, workload, layers, layout=experiment.cache_layout)
    return weights_bytes, cache_bytes


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
