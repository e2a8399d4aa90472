"""Traces one phase of an experiment with torch_xla: a transformers model with a static cache."""

# pyright: reportMissingImports=false
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

from meshscope.events.enums import Part, Phase
from meshscope.programs.torchxla.attention import register_attention
from meshscope.programs.torchxla.caching import Caches, n_cache_slots, new_arrays
from meshscope.programs.torchxla.experts import register_experts
from meshscope.programs.torchxla.layouts import (
    Layouts,
    ResidualSpecs,
    Spec,
    layouts_of,
    residual_specs,
)
from meshscope.programs.torchxla.lowering import Lowered, Traced, lowered, parameters_of
from meshscope.programs.torchxla.models import meta_model, with_arguments
from meshscope.programs.torchxla.scopes import add_layouts, add_scopes
from meshscope.programs.torchxla.stages import add_pipeline, layers_of_stage
from meshscope.programs.torchxla.tensors import ARGUMENT, TORCH_DTYPES, Argument, Tensors, scope
from meshscope.spec.experiment import Experiment
from meshscope.spec.program import Partitioner

TOKENS, POSITION = "tokens", "position"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram:
    """A traced phase: the program, its arguments by name, and the values of constant arguments.

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
        """Lower the program for the devices."""
        return lowered(self.traced, self.devices, name=self.phase.value)


def build_program(experiment: Experiment, phase: Phase, devices: list[Any]) -> TracedProgram:
    """Trace one phase for the plan's devices, without weights."""
    xr.use_spmd()
    _add_operators()
    torch_xla._XLAC._set_xla_all_numbers_special_scalars(True)  # noqa: SLF001  trace numbers as constants
    tensors = Tensors(layouts_of(experiment.model, experiment.plan))
    is_manual = experiment.program.partitioner is Partitioner.MANUAL
    attention = register_attention(experiment, phase, tensors) if is_manual else "eager"
    model = meta_model(experiment, attention=attention)
    if experiment.model.moe is not None:
        model.config._experts_implementation = register_experts(experiment, phase, tensors)  # noqa: SLF001
    is_pipeline = experiment.plan.pp > 1
    if is_pipeline:
        model.model.layers = model.model.layers[: layers_of_stage(experiment)]
    constants = with_arguments(model, experiment, tensors)
    add_layouts(model, experiment, phase, tensors)
    add_scopes(model, experiment)
    if is_pipeline:
        add_pipeline(model, experiment, phase, tensors)
    with torch.no_grad(), scope(phase.value):
        step = _Step(experiment=experiment, phase=phase, tensors=tensors)
        next_tokens, logits, cache = step.traced(model)
    outputs = [next_tokens, logits, *cache.values()]
    proto = torch_xla._XLAC._get_xla_tensors_hlo_proto(outputs)  # noqa: SLF001
    tensors.position = None  # objects registered with transformers outlive the trace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Inputs and outputs of one step."""

    experiment: Experiment
    phase: Phase
    tensors: Tensors

    @property
    def streams(self) -> ResidualSpecs:
        """Specs of tokens, residual stream and logits."""
        return residual_specs(self.experiment, self.phase, self.tensors.layouts)

    def traced(self, model: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Next tokens [B], logits [B, 1, V] and the cache by name."""
        workload = self.experiment.workload
        n_tokens = workload.prompt if self.phase is Phase.PREFILL else 1
        tokens = self.tensors.argument(
            TOKENS, (workload.batch, n_tokens), torch.int64, self.streams.tokens
        )
        position = self.tensors.argument(POSITION, (), torch.int64, ())
        self.tensors.position = position
        positions = position + torch.arange(n_tokens, device=torch_xla.device())
        cache = Caches(self.experiment, self.phase, self.tensors).arguments(model, position)
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
        return next_tokens, logits, new_arrays(cache, self.tensors)

    def _mask(self, positions: Any) -> Any:
        """[1, 1, S, T]: zero for visible slots, the lowest number for masked ones."""
        dtype = TORCH_DTYPES[self.experiment.workload.activation_dtype]
        slots = torch.arange(n_cache_slots(self.experiment), device=torch_xla.device())
        is_hidden = slots[None, :] > positions[:, None]
        lowest = torch.finfo(dtype).min
        return (is_hidden.to(dtype) * lowest)[None, None]


@cache
def _add_operators() -> torch.library.Library:
    """Register operators that transformers uses and torch_xla lacks, once per process.

    Without them torch_xla falls back to the host, which fails for tensors without memory.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("polar", _polar, "XLA")
    return library


def _polar(magnitude: Any, angle: Any) -> Any:
    """Complex numbers from magnitude and angle, for the rotary embedding of DeepSeek-V2."""
    parts = torch.stack([magnitude * torch.cos(angle), magnitude * torch.sin(angle)], dim=-1)
    return torch.view_as_complex_copy(parts)  # below functionalization
