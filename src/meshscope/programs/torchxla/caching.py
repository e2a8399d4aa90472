"""The static cache of transformers, with its arrays as program arguments, also in a manual region.

Shapes: P stages, B batch, b one device's share of the batch, m its share of a micro-batch,
K key and value heads (1 of latents), T slots, H width.
"""

# pyright: reportMissingImports=false
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import transformers
from transformers.cache_utils import StaticLayer

from meshscope.model.layers import Layer
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.grouped import grouped_of
from meshscope.model.mechanisms.latent import latent_of
from meshscope.plans.caches import cache_slots, layer_cache
from meshscope.plans.stages import stacked_layers
from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.tensors import TORCH_DTYPES, Tensors

ARRAYS = ("keys", "values")


@dataclass
class States:
    """A layer's arrays [B, T, width] other than the keys and values of all positions; each step replaces them."""

    arrays: dict[str, Any]

    def write(self, name: str, new: Any, slots: Any = None) -> None:
        """Write `new` [B, n, width] to the slots [n], or to the first ones."""
        array = self.arrays[name]
        new = new.to(array.dtype)
        first = torch.cat([new, array[:, new.shape[1] :]], dim=1) if slots is None else None
        self.arrays[name] = array.index_copy(1, slots, new) if first is None else first

    def write_latest(self, name: str, new: Any, positions: Any) -> None:
        """Write the latest of `new` [B, S, width] to a ring buffer, at the positions [S] of decode, or from 0 on if None."""
        n_slots, n_new = self.arrays[name].shape[1], new.shape[1]
        if positions is None and n_new > n_slots:
            new = torch.roll(new[:, -n_slots:], n_new % n_slots, dims=1)
        self.write(name, new, None if positions is None else positions % n_slots)


def cache_arguments(tensors: Tensors, position: Any) -> Any:
    """A cache filled up to `position`, whose arrays are program arguments."""
    layers, plan = tensors.experiment.model.layers, tensors.experiment.plan
    if not tensors.layouts.has_region:
        cached = [_layer(tensors, index, layer, position, ()) for index, layer in enumerate(layers)]
        return transformers.Cache(layers=cached)
    stacks = stacked_layers(layers, plan.pp)
    firsts = [next(x for x in stacks[i] if x is not None) for i in range(len(layers))]
    stacked = {
        first: _layer(tensors, first, layers[first], position, stacks[first])
        for first in sorted({*firsts})
    }
    return transformers.Cache(layers=[stacked[first] for first in firsts])


def _layer(
    tensors: Tensors, index: int, layer: Layer, position: Any, stack: tuple[int | None, ...]
) -> Any:
    """The arrays of one layer: keys and values [B, K, T, H] or two parts of a latent, or as the plan declares."""
    experiment, layouts = tensors.experiment, tensors.layouts
    attention, workload = experiment.model.attention, experiment.workload
    n_slots = cache_slots(experiment.plan, workload) * experiment.plan.cp
    if attention.mechanism is Mechanism.COMPRESSED:
        return _states(tensors, index, layer, n_slots)
    if attention.mechanism is Mechanism.GROUPED:
        n_heads, widths = grouped_of(attention).n_kv_heads, attention.head_widths
        heads = layouts.kv_heads
    else:
        latent = latent_of(attention)
        n_heads, widths, heads = 1, (latent.kv_rank, latent.rope_dim), ()
    spec: Spec = (layouts.data, heads, layouts.axes("cp"), ())
    # Windows are in the mask: a layer with one would keep fewer slots and move them in each step.
    cached: Any = StaticLayer(max_cache_len=n_slots)
    if layouts.has_region:
        cached = StageLayer(tensors, spec, n_slots)
    dtype = TORCH_DTYPES[workload.cache_dtype]
    for name, width in zip(ARRAYS, widths, strict=True):
        shape, full = (workload.batch, n_heads, n_slots, width), argument_name(index, name)
        setattr(cached, name, tensors.argument(full, shape, dtype, spec, layers=stack))
    cached.dtype, cached.device = dtype, position.device
    cached.batch_size, cached.num_heads = workload.batch, n_heads
    cached.k_head_dim, cached.v_head_dim = widths
    cached.cumulative_length = position.clone()  # each layer advances its counter
    cached.is_initialized = True
    return cached


def _states(tensors: Tensors, index: int, layer: Layer, n_slots: int) -> States:
    """Arrays [B, *heads, slots, width] as the plan declares them."""
    experiment, layouts = tensors.experiment, tensors.layouts
    workload, arrays = experiment.workload, dict[str, Any]()
    for array in layer_cache(experiment.model, experiment.plan, layer):
        *heads, width = array.shape
        shape = (workload.batch, *heads, array.n_slots(n_slots), width)
        of_heads = (layouts.split(dim) for dim in array.dims[:-1])
        spec: Spec = (layouts.data, *of_heads, (), ())
        name, dtype = argument_name(index, array.name), array.dtype or workload.cache_dtype
        arrays[array.name] = tensors.argument(name, shape, TORCH_DTYPES[dtype], spec)
    return States(arrays)


def argument_name(index: int, array: str) -> str:
    """The argument name of a layer's cache array."""
    return f"cache.{index}.{array}"


def new_arrays(cache: Any, tensors: Tensors) -> dict[str, Any]:
    """The cache arrays after the step by name, with unchanged sharding."""
    arrays, seen = dict[str, Any](), set[int]()
    for index, layer in enumerate(cache.layers):
        if id(layer) in seen:  # also the cache of an earlier stage
            continue
        seen.add(id(layer))
        is_named = isinstance(layer, States)
        held = layer.arrays if is_named else {a: getattr(layer, a) for a in ARRAYS}
        for array, value in held.items():
            name = argument_name(index, array)
            arrays[name] = tensors.annotate(value, tensors.arguments[name].spec)
    return arrays


class StageLayer(StaticLayer):
    """Keys and values [P, B, K, T, H] of a layer of each stage; in the manual region, a device has [b, ...].

    A device of cp has contiguous slots, T is [cp, slots per device]: one block of the prompt, then round-robin tokens.
    """

    local: dict[str, Any]
    rows: Any = (
        None  # the sequences [m] of the device's batch that the layer runs for; None for all
    )

    def __init__(self, tensors: Tensors, spec: Spec, n_slots: int) -> None:
        super().__init__(max_cache_len=n_slots)
        self.spec, self.experiment = spec, tensors.experiment
        self.is_prompt = not tensors.is_decode

    def enter(self, tensors: Tensors) -> None:
        """Enter the manual region with this device's shard of the arrays and the position of this step."""
        self.local = {name: tensors.of_stage(getattr(self, name), self.spec) for name in ARRAYS}
        self.cumulative_length = tensors.entered(tensors.position, ())
        self.rank = tensors.rank("cp") if self.experiment.plan.cp > 1 else None

    def leave(self, tensors: Tensors) -> None:
        """Leave the manual region with the whole arrays."""
        spec = (tensors.layouts.axes("pp"), *self.spec)
        for name, x in self.local.items():
            setattr(self, name, tensors.left(x[None], spec))

    def get_seq_length(self) -> Any:
        """The position of the first token of this step on this device."""
        if self.rank is None or not self.is_prompt:
            return self.cumulative_length
        n_local = self.experiment.workload.prompt // self.experiment.plan.cp
        return self.cumulative_length + self.rank * n_local

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The keys and values of the micro-batch that queries attend to, including this step's."""
        return self._written("keys", key_states), self._written("values", value_states)

    def _written(self, name: str, x: Any) -> Any:
        """Write x [m, K, S, H] at the positions of this step; returns the cached array, or x if cp splits a prompt."""
        held, n_new = self.local[name], x.shape[2]
        now = held if self.rows is None else held.index_select(0, self.rows)
        places = torch.arange(n_new, device=torch_xla.device())
        new = x.to(held.dtype)
        if self.rank is None:
            places = places + self.cumulative_length
        elif not self.is_prompt:  # one device of cp writes the token of a decode step
            size, n_prompt = self.experiment.plan.cp, self.experiment.workload.prompt
            number = (self.cumulative_length - n_prompt).reshape(1)
            places, is_here = n_prompt // size + number // size, number % size == self.rank
            new = torch.where(is_here, new, now.index_select(2, places))
        now = now.index_copy(2, places, new)
        self.local[name] = now if self.rows is None else held.index_copy(0, self.rows, now)
        return x if self.rank is not None and self.is_prompt else now
