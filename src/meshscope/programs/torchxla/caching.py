"""The static cache of transformers, with its arrays as program arguments, also in stages of a pipeline.

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
from meshscope.plans.experiment import Experiment
from meshscope.plans.stages import stacked_layers
from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.tensors import TORCH_DTYPES, Tensors

ARRAYS = ("keys", "values")
STAGES = ("pp",)


@dataclass
class States:
    """A layer's arrays other than the keys and values of all positions, by name; each step replaces them."""

    arrays: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Caches:
    """Builds the cache of one phase."""

    tensors: Tensors

    @property
    def experiment(self) -> Experiment:
        """The experiment of the program."""
        return self.tensors.experiment

    def arguments(self, position: Any) -> Any:
        """A cache filled up to `position`, whose arrays are program arguments."""
        layers, plan = self.experiment.model.layers, self.experiment.plan
        if plan.pp == 1:
            cached = [self._layer(index, layer, position, ()) for index, layer in enumerate(layers)]
            return transformers.Cache(layers=cached)
        stacks = stacked_layers(layers, plan.pp)
        firsts = [next(x for x in stacks[i] if x is not None) for i in range(len(layers))]
        stacked = {
            first: self._layer(first, layers[first], position, stacks[first])
            for first in sorted({*firsts})
        }
        return transformers.Cache(layers=[stacked[first] for first in firsts])

    @property
    def n_slots(self) -> int:
        """Cache slots T over all cp devices."""
        return cache_slots(self.experiment.plan, self.experiment.workload) * self.experiment.plan.cp

    def _layer(self, index: int, layer: Layer, position: Any, stack: tuple[int | None, ...]) -> Any:
        """The arrays of one layer: keys and values [B, K, T, H] or two parts of a latent, or as the plan declares."""
        experiment, layouts = self.experiment, self.tensors.layouts
        plan, attention, workload = experiment.plan, experiment.model.attention, experiment.workload
        if attention.mechanism is Mechanism.COMPRESSED:
            return self._states(index, layer)
        if attention.mechanism is Mechanism.GROUPED:
            n_heads, widths = grouped_of(attention).n_kv_heads, attention.head_widths
            heads = layouts.kv_heads
        else:
            latent = latent_of(attention)
            n_heads, widths, heads = 1, (latent.kv_rank, latent.rope_dim), ()
        spec: Spec = (layouts.data, heads, layouts.axes("cp"), ())
        if plan.pp > 1:
            cached: Any = StageLayer(self, spec)
        elif plan.cp > 1:
            cached = ContextLayer(self, spec)
        else:
            # Windows are in the mask: a layer with one would keep fewer slots and move them in each step.
            cached = StaticLayer(max_cache_len=self.n_slots)
        dtype = TORCH_DTYPES[workload.cache_dtype]
        for name, width in zip(ARRAYS, widths, strict=True):
            shape, full = (workload.batch, n_heads, self.n_slots, width), argument_name(index, name)
            array = self.tensors.argument(full, shape, dtype, spec, layers=stack)
            if isinstance(cached, StageLayer):
                cached.arrays[name] = array
            else:
                setattr(cached, name, array)
        cached.dtype, cached.device = dtype, position.device
        cached.batch_size, cached.num_heads = workload.batch, n_heads
        cached.k_head_dim, cached.v_head_dim = widths
        cached.cumulative_length = position.clone()  # each layer advances its counter
        cached.is_initialized = True
        return cached

    def _states(self, index: int, layer: Layer) -> States:
        """Arrays [B, *heads, slots, width] as the plan declares them."""
        experiment, layouts = self.experiment, self.tensors.layouts
        workload, arrays = experiment.workload, dict[str, Any]()
        for array in layer_cache(experiment.model, experiment.plan, layer):
            *heads, width = array.shape
            shape = (workload.batch, *heads, array.n_slots(self.n_slots), width)
            of_heads = (layouts.split(dim) for dim in array.dims[:-1])
            spec: Spec = (layouts.data, *of_heads, (), ())
            name, dtype = argument_name(index, array.name), array.dtype or workload.cache_dtype
            arrays[array.name] = self.tensors.argument(name, shape, TORCH_DTYPES[dtype], spec)
        return States(arrays)


class ContextLayer(StaticLayer):
    """A static cache layer split over cp: one block of the prompt each, then round-robin tokens.

    The slots of a device are contiguous: T is [cp, slots per device].
    """

    def __init__(self, caches: Caches, spec: Spec) -> None:
        super().__init__(max_cache_len=caches.n_slots)
        self.caches, self.spec = caches, spec

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Prefill attends to the given keys and values, decode to the whole cache."""
        given = (key_states, value_states)
        self.cumulative_length.add_(key_states.shape[2])
        is_prompt = not self.caches.tensors.is_decode
        write = self._with_blocks if is_prompt else self._with_token
        self.keys, self.values = map(write, (self.keys, self.values), given)
        return given if is_prompt else (self.keys, self.values)

    def _with_blocks(self, array: Any, x: Any) -> Any:
        """The array [B, K, T, H] with each device's block of x [B, K, S, H] in its first slots."""
        tensors, size = self.caches.tensors, self.caches.experiment.plan.cp
        shares: Spec = (*self.spec[:3], (), ())
        held, new = (
            tensors.annotate(a.reshape(*a.shape[:2], size, -1, a.shape[3]), shares)
            for a in (array, x)
        )
        both = torch.cat([new, held[:, :, :, new.shape[3] :]], dim=3)
        return tensors.annotate(both, shares).reshape(array.shape)

    def _with_token(self, array: Any, x: Any) -> Any:
        """The array with x [B, K, 1, H] in the slot of the token of this step.

        An indexed copy would be equivalent, but the partitioner gathers the cache for it.
        """
        experiment, position = self.caches.experiment, self.caches.tensors.position
        size, n_prompt = experiment.plan.cp, experiment.workload.prompt
        number = position - n_prompt
        owner, turn = number % size, number // size
        n_each = cache_slots(experiment.plan, experiment.workload)
        slot = owner * n_each + n_prompt // size + turn
        slots = torch.arange(self.max_cache_len, device=position.device)
        is_here = (slots == slot)[None, None, :, None]
        return torch.where(is_here, x.to(array.dtype), array)


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
        is_named = isinstance(layer, States | StageLayer)
        held = layer.arrays if is_named else {a: getattr(layer, a) for a in ARRAYS}
        for array, value in held.items():
            name = argument_name(index, array)
            arrays[name] = tensors.annotate(value, tensors.arguments[name].spec)
    return arrays


class StageLayer(StaticLayer):
    """Keys and values [P, B, K, T, H]; in the manual region of the pipeline, a device has [b, ...].

    cp splits slots as in `ContextLayer`.
    """

    local: dict[str, Any]
    rows: Any  # the sequences [m] of the device's batch that the layer runs for

    def __init__(self, caches: Caches, spec: Spec) -> None:
        super().__init__(max_cache_len=caches.n_slots)
        self.arrays: dict[str, Any] = {}
        self.spec, self.experiment = spec, caches.experiment
        self.is_prompt = not caches.tensors.is_decode

    def enter(self, tensors: Tensors) -> None:
        """Enter the manual region with this device's shard of the arrays and the position of this step."""
        self.local = {
            name: tensors.entered(array, (STAGES, *self.spec))[0]
            for name, array in self.arrays.items()
        }
        self.cumulative_length = tensors.entered(tensors.position, ())
        self.rank = tensors.rank("cp") if self.experiment.plan.cp > 1 else None

    def leave(self, tensors: Tensors) -> None:
        """Leave the manual region with the whole arrays."""
        self.arrays = {
            name: tensors.left(array[None], (STAGES, *self.spec))
            for name, array in self.local.items()
        }

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
        now = held.index_select(0, self.rows)
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
        self.local[name] = held.index_copy(0, self.rows, now)
        return x if self.rank is not None and self.is_prompt else now
