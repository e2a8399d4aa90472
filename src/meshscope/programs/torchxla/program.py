"""Traces one phase of an experiment with torch_xla: a transformers model with a static cache.

Hooks on the model open named scopes and shard the residual stream. The scopes are phase, layer and part, as in all programs (`readers/hlo/attribution.py`). Hooks run
in registration order, so sharding annotations carry the scope of their module.
"""

# pyright: reportMissingImports=false
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

from meshscope.events.enums import Part, Phase
from meshscope.model.layers import Layer, MlpKind
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Partitioner
from meshscope.programs.torchxla.caching import Caches, new_arrays
from meshscope.programs.torchxla.compressed import ChosenPositions, CompressionStep, EntryAttention
from meshscope.programs.torchxla.configs import LAYER_TYPES, MASKED_BY_KIND
from meshscope.programs.torchxla.context import keep_latents, mask_of, register_attention
from meshscope.programs.torchxla.experts import order_tokens, register_experts
from meshscope.programs.torchxla.layouts import (
    Layouts,
    ResidualSpecs,
    Spec,
    layouts_of,
    residual_specs,
)
from meshscope.programs.torchxla.linear import DeltaAttention, Placing
from meshscope.programs.torchxla.lowering import Lowered, Traced, lowered, parameters_of
from meshscope.programs.torchxla.models import (
    EMBEDDINGS,
    attention_of,
    feed_forward,
    meta_model,
    norms_before_blocks,
    with_arguments,
)
from meshscope.programs.torchxla.replaced import MixedLayer
from meshscope.programs.torchxla.stages import add_pipeline, drop_layers
from meshscope.programs.torchxla.tensors import ARGUMENT, Argument, Tensors, scope

TOKENS, POSITION = "tokens", "position"
_IN_LAYER = re.compile(r"model\.layers\.(\d+)(?:\.(.+))?")
_OUTER = {
    "model.embed_tokens": Part.EMBED,
    "model.embed_tokens_per_layer": Part.EMBED,
    "model.per_layer_model_projection": Part.EMBED,
    "model.per_layer_projection_norm": Part.EMBED,
    "model.hc_head": Part.LM_HEAD,
    "model.norm": Part.LM_HEAD,
    "lm_head": Part.LM_HEAD,
}


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
    if experiment.plan.cp > 1 and experiment.model.attention.mechanism is Mechanism.LATENT:
        keep_latents(model)
    is_pipeline = experiment.plan.pp > 1
    if is_pipeline:
        drop_layers(model, experiment)
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
        cache = Caches(self.experiment, self.phase, self.tensors).arguments(position)
        logits = model(
            input_ids=tokens,
            position_ids=positions[None],
            attention_mask=self._masks(positions),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        with scope(Part.SAMPLE.value):
            next_tokens = logits[:, -1].argmax(dim=-1)
            self.tensors.annotate(next_tokens, self.streams.entered[:1])
        return next_tokens, logits, new_arrays(cache, self.tensors)

    def _masks(self, positions: Any) -> Any:
        """The mask of every layer, or of each kind by name if the model has several."""
        model = self.experiment.model
        if model.attention.mechanism is Mechanism.COMPRESSED:
            return {"none": None}  # its modules compare positions themselves
        kinds = dict.fromkeys(layer.attention for layer in model.layers)
        masks = {LAYER_TYPES[kind]: mask_of(self.experiment, positions, kind) for kind in kinds}
        return masks if model.family in MASKED_BY_KIND else next(iter(masks.values()))


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


def scope_of_module(name: str, experiment: Experiment) -> str | None:
    """The scope that a module adds; None if it adds none."""
    if name in _OUTER:
        return _OUTER[name].value
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return None
    layer, inner = int(match[1]), match[2]
    if inner is None:
        return None if experiment.plan.pp > 1 else f"layer{layer}"
    kind = experiment.model.layers[layer]
    before_mlp = Part.MLP if kind.has_mlp else Part.MOE_ROUTER
    of_inner = {
        "input_layernorm": Part.ATTN,
        "self_attn": Part.ATTN,
        "attn_hc": Part.ATTN,
        "ffn_hc": Part.MOE_ROUTER,
        "linear_attn": Part.ATTN,
        "post_attention_layernorm": Part.ATTN if experiment.model.has_post_norms else before_mlp,
        "pre_feedforward_layernorm": before_mlp,
        "post_feedforward_layernorm": Part.MOE_COMBINE if kind.has_experts else Part.MLP,
        "post_feedforward_layernorm_1": Part.MLP,
        "pre_feedforward_layernorm_2": Part.MOE_ROUTER,
        "post_feedforward_layernorm_2": Part.MOE_COMBINE,
        "per_layer_input_gate": Part.MLP,
        "per_layer_projection": Part.MLP,
        "post_per_layer_input_norm": Part.MLP,
        "router": Part.MOE_ROUTER,
        "mlp": Part.MLP if kind.has_mlp else None,
        "feed_forward": Part.MLP if kind.has_mlp else None,
        "feed_forward.shared_expert": Part.MOE_SHARED,
        "mlp.gate": Part.MOE_ROUTER,
        "mlp.router": Part.MOE_ROUTER,
        "mlp.shared_experts": Part.MOE_SHARED,
    }
    part = of_inner.get(inner)
    return None if part is None or (inner == "mlp.gate" and kind.has_mlp) else part.value


def add_scopes(model: Any, experiment: Experiment) -> None:
    """Add hooks that open a module's scope before its forward pass and close it afterwards.

    The selection of the last positions, between layers and head, is in the head's scope.
    """
    for name, module in model.named_modules():
        module_scope = scope_of_module(name, experiment)
        if module_scope is not None and module is not model.lm_head:
            before, behind = _brackets(module_scope)
            module.register_forward_pre_hook(before)
            module.register_forward_hook(behind)
    before, behind = _brackets(Part.LM_HEAD.value)
    model.model.register_forward_hook(before)
    model.lm_head.register_forward_hook(behind)


def _brackets(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    opened: list[Any] = []

    def before(*_: Any) -> None:
        opened.append(scope(name))
        opened[-1].__enter__()

    def behind(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    return before, behind


def add_layouts(model: Any, experiment: Experiment, phase: Phase, tensors: Tensors) -> None:
    """Add hooks that shard the residual stream and the logits; call before `add_scopes`."""
    streams = residual_specs(experiment, phase, tensors.layouts)
    for name in EMBEDDINGS:
        if hasattr(model.model, name):
            _lay_out(getattr(model.model, name), tensors, streams.residual)
    for layer, kind in zip(model.model.layers, experiment.model.layers, strict=True):
        if isinstance(layer, torch.nn.Identity):  # a stage that runs the branch of another
            continue
        step = CompressionStep(phase=phase, tensors=tensors, rotary=model.model.rotary_emb)
        _connect(attention_of(layer), step)
        if isinstance(layer, MixedLayer):
            layer.tensors, layer.residual = tensors, streams.residual
        order_tokens(feed_forward(layer), kind, experiment, phase, tensors)
        _lay_out_layer(layer, kind, tensors, streams)
    if streams.is_split and experiment.plan.pp == 1:  # a pipeline returns only the last positions
        _lay_out(model.model.norm, tensors, streams.residual)
    _lay_out(model.lm_head, tensors, streams.logits, streams.rows)


def _connect(attention: Any, step: CompressionStep) -> None:
    if isinstance(attention, DeltaAttention):
        attention.placing = Placing(phase=step.phase, tensors=step.tensors)
    if isinstance(attention, EntryAttention):
        attention.step = step
    indexer = getattr(attention, "indexer", None)
    if isinstance(indexer, ChosenPositions):
        indexer.tensors = step.tensors


def _lay_out_layer(layer: Any, kind: Layer, tensors: Tensors, streams: ResidualSpecs) -> None:
    """Shard the outputs of a layer's blocks, and gather their inputs if the residual stream is split."""
    for block in (attention_of(layer), feed_forward(layer)):
        _lay_out(block, tensors, streams.residual)
    if not streams.is_split:
        return
    for norm in norms_before_blocks(layer):
        _lay_out(norm, tensors, streams.residual, streams.entered)
    if kind.mlp is MlpKind.DENSE_AND_MOE:
        _gather_for_experts(layer, tensors, streams)


def _gather_for_experts(layer: Any, tensors: Tensors, streams: ResidualSpecs) -> None:
    """Gather the residual stream for experts beside an MLP, which read it before any norm, and split their sum."""
    taken: list[Any] = []

    def of_stream(_module: Any, inputs: tuple[Any, ...]) -> None:
        with scope(Part.MOE_DISPATCH.value):
            whole = inputs[0].clone()
            for spec in (streams.residual, streams.entered):
                tensors.annotate(whole, spec)
            taken[:] = [whole.reshape(-1, whole.shape[-1])]

    def gathered(_module: Any, _inputs: tuple[Any, ...]) -> Any:
        return taken[0]

    def split(_module: Any, inputs: tuple[Any, ...]) -> None:
        with scope(Part.MOE_COMBINE.value):
            tensors.annotate(inputs[0], streams.residual)

    layer.pre_feedforward_layernorm.register_forward_pre_hook(of_stream)
    for reader in (layer.router, layer.pre_feedforward_layernorm_2):
        reader.register_forward_pre_hook(gathered)
    layer.post_feedforward_layernorm_2.register_forward_pre_hook(split)


def _lay_out(module: Any, tensors: Tensors, *specs: Spec) -> None:
    """Annotate the output of a module with one spec after another; the compiler reshards it."""

    def behind(_module: Any, _inputs: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        for spec in specs:
            tensors.annotate(x, spec)
        return output

    module.register_forward_hook(behind)
