"""One phase of an experiment as torch_xla traces it: a transformers model with a static cache."""

from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr
import transformers

from meshscope.arch.model import GroupedAttention, LatentAttention
from meshscope.plan.caches import layer_cache
from meshscope.plan.context import cache_slots
from meshscope.plan.experiment import Experiment, Partitioner
from meshscope.plan.weights import Dim
from meshscope.table.kinds import Part, Phase
from meshscope.torchxla.attention import register_attention
from meshscope.torchxla.experts import register_experts
from meshscope.torchxla.layouts import Layouts, Spec, layouts_of
from meshscope.torchxla.lowering import Lowered, Traced, lowered, parameters_of
from meshscope.torchxla.models import meta_model, with_arguments
from meshscope.torchxla.operators import add_operators
from meshscope.torchxla.scopes import add_layouts, add_scopes
from meshscope.torchxla.streams import streams_of
from meshscope.torchxla.tensors import ARGUMENT, TORCH_DTYPES, Argument, Tensors, scope

TOKENS, POSITION = "tokens", "position"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram:
    """A traced phase: its program, its arguments by name, and the values of those that are constants.

    It returns next tokens [B], logits [B, 1, V] and the new cache, in the order of `cache`.
    """

    phase: Phase
    traced: Traced
    arguments: dict[str, Argument]
    constants: dict[str, Any]
    cache: tuple[str, ...]
    result_specs: tuple[Spec, ...]
    layouts: Layouts
    devices: list[Any]

    def lower(self) -> Lowered:
        """Ready for the devices."""
        return lowered(self.traced, self.devices, name=self.phase.value)


def build_program(experiment: Experiment, phase: Phase, devices: list[Any]) -> TracedProgram:
    """Traces one phase for as many devices as the plan has, without weights."""
    xr.use_spmd()
    add_operators()
    torch_xla._XLAC._set_xla_all_numbers_special_scalars(True)  # noqa: FBT003, SLF001  numbers as constants
    tensors = Tensors(layouts_of(experiment.model, experiment.plan))
    is_manual = experiment.program.partitioner is Partitioner.MANUAL
    model = meta_model(experiment, attention=register_attention(tensors) if is_manual else "eager")
    if experiment.model.moe is not None:
        model.config._experts_implementation = register_experts(experiment, phase, tensors)  # noqa: SLF001
    constants = with_arguments(model, experiment, tensors)
    add_layouts(model, experiment, phase, tensors)
    add_scopes(model, experiment)
    with torch.no_grad(), scope(phase.value):
        step = _Step(experiment=experiment, phase=phase, tensors=tensors)
        next_tokens, logits, cache = step.traced(model)
    outputs = [next_tokens, logits, *cache.values()]
    proto = torch_xla._XLAC._get_xla_tensors_hlo_proto(outputs)  # noqa: SLF001
    layouts = tensors.layouts
    rows: Spec = (layouts.data, (), ())
    specs = (rows[:1], rows, *(tensors.arguments[n].spec for n in cache))
    traced = Traced(
        proto=proto,
        parameters=parameters_of(proto, ARGUMENT),
        shardings={name: layouts.sharding(a.spec) for name, a in tensors.arguments.items()},
        result_shardings=tuple(layouts.sharding(spec) for spec in specs),
        aliases={2 + number: name for number, name in enumerate(cache)},
    )
    return TracedProgram(
        phase=phase,
        traced=traced,
        arguments=tensors.arguments,
        constants=constants,
        cache=tuple(cache),
        result_specs=specs,
        layouts=layouts,
        devices=devices,
    )


class _Step:
    """What one step is given and what it returns."""

    def __init__(self, *, experiment: Experiment, phase: Phase, tensors: Tensors) -> None:
        self.experiment, self.phase, self.tensors = experiment, phase, tensors
        self.streams = streams_of(experiment, phase, tensors.layouts)
        self.n_slots = cache_slots(experiment.plan, experiment.workload) * experiment.plan.cp

    def traced(self, model: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Next tokens [B], logits [B, 1, V] and the cache by name."""
        workload = self.experiment.workload
        n_tokens = workload.prompt if self.phase is Phase.PREFILL else 1
        tokens = self.tensors.argument(
            TOKENS, (workload.batch, n_tokens), torch.int64, self.streams.tokens
        )
        position = self.tensors.argument(POSITION, (), torch.int64, ())
        positions = position + torch.arange(n_tokens, device=torch_xla.device())
        cache = self._cache(model, position)
        logits = model(
            input_ids=tokens,
            position_ids=positions[None],
            attention_mask=self._mask(positions),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        with scope(Part.SAMPLE.value):
            next_tokens = logits[:, -1].argmax(dim=-1)
            self.tensors.annotate(next_tokens, self.streams.entered[:1])
        return next_tokens, logits, self._new_cache(cache)

    def _mask(self, positions: Any) -> Any:
        """[1, 1, S, T]: zero where a query sees a slot, the lowest number elsewhere."""
        dtype = TORCH_DTYPES[self.experiment.workload.activation_dtype]
        slots = torch.arange(self.n_slots, device=torch_xla.device())
        is_hidden = slots[None, :] > positions[:, None]
        lowest = torch.finfo(dtype).min
        return (is_hidden.to(dtype) * lowest)[None, None]

    def _cache(self, model: Any, position: Any) -> Any:
        """A static cache whose arrays are arguments."""
        cache = transformers.StaticCache(config=model.config, max_cache_len=self.n_slots)
        dtype = TORCH_DTYPES[self.experiment.workload.cache_dtype]
        batch = self.experiment.workload.batch
        for index, layer in enumerate(cache.layers):
            (n_heads, widths), spec = self._cached(index)
            arrays = []
            for name, width in zip(("keys", "values"), widths, strict=True):
                shape = (batch, n_heads, self.n_slots, width)
                arrays.append(self.tensors.argument(f"cache.{index}.{name}", shape, dtype, spec))
            layer.keys, layer.values = arrays
            layer.dtype, layer.device = dtype, arrays[0].device
            layer.batch_size, layer.num_heads = batch, n_heads
            layer.k_head_dim, layer.v_head_dim = widths
            layer.cumulative_length = position.clone()  # each layer counts on by itself
            layer.is_initialized = True
        return cache

    def _cached(self, index: int) -> tuple[tuple[int, tuple[int, int]], Spec]:
        """Heads and widths of what one layer keeps of a position, and how it is laid out."""
        model, layouts = self.experiment.model, self.tensors.layouts
        context = layouts.axes("cp")
        match model.attention:
            case GroupedAttention() as attention:
                spec = (layouts.data, layouts.split(Dim.KV_HEADS), context, ())
                return (attention.n_kv_heads, (attention.head_dim, attention.head_dim)), spec
            case LatentAttention() as attention:
                spec = (layouts.data, (), context, ())
                return (1, (attention.kv_rank, attention.rope_dim)), spec
            case _:
                raise AssertionError(model.attention)

    def _new_cache(self, cache: Any) -> dict[str, Any]:
        """The arrays of the cache after the step, laid out as before it."""
        found: dict[str, Any] = {}
        for index, layer in enumerate(cache.layers):
            for name in ("keys", "values"):
                full = f"cache.{index}.{name}"
                found[full] = self.tensors.annotate(
                    getattr(layer, name), self.tensors.arguments[full].spec
                )
        return found


__all__ = ["TracedProgram", "build_program", "layer_cache"]
