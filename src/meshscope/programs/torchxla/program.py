"""Traces one phase of an experiment with torch_xla: a transformers model with a static cache.

Hooks on the model open named scopes and shard the residual stream. The scopes are phase, layer and
part, as in all programs (`readers/hlo/attribution.py`). Hooks run in registration order, so sharding
annotations carry the scope of their module.
"""

# pyright: reportMissingImports=false
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

from meshscope.events.enums import Part, Phase
from meshscope.model.families import LayerRule
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Partitioner
from meshscope.programs.torchxla.caching import cache_arguments, new_arrays
from meshscope.programs.torchxla.configs import LAYER_TYPES
from meshscope.programs.torchxla.context import mask_of, register_attention
from meshscope.programs.torchxla.experts import register_experts
from meshscope.programs.torchxla.layouts import Layouts, Spec
from meshscope.programs.torchxla.lowering import Lowered, Traced, lowered, parameters_of
from meshscope.programs.torchxla.models import meta_model, norms_before_blocks, with_arguments
from meshscope.programs.torchxla.stages import add_region, drop_layers
from meshscope.programs.torchxla.tensors import (
    ARGUMENT,
    Argument,
    Tensors,
    all_gather,
    on_output,
    scope,
)

TOKENS, POSITION, EMBEDDING = "tokens", "position", "model.embed_tokens.weight"
_IN_LAYER = re.compile(r"model\.layers\.(\d+)(?:\.(.+))?")
_OUTER = {
    "model.embed_tokens": Part.EMBED,
    "model.hc_head": Part.LM_HEAD,
    "model.norm": Part.LM_HEAD,
    "lm_head": Part.LM_HEAD,
}
# Modules of layers whose part does not depend on the kind of layer.
_INNER = {
    **dict.fromkeys(("input_layernorm", "self_attn", "attn_hc"), Part.ATTN),
    **dict.fromkeys(("ffn_hc", "mlp.router"), Part.MOE_ROUTER),
    "mlp.shared_experts": Part.MOE_SHARED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram(Traced):
    """A traced phase: the program, its arguments by name, and the values of constant arguments.

    It returns next tokens [B], logits [B, 1, V] and the new cache, in the order of `cache`.
    """

    phase: Phase
    arguments: dict[str, Argument]
    constants: dict[str, Any]
    cache: tuple[str, ...]
    result_specs: tuple[Spec, ...]
    layouts: Layouts
    devices: list[Any]

    def lower(self) -> Lowered:
        """Lower the program for the devices."""
        return lowered(self, self.devices, name=self.phase.value)


def build_program(experiment: Experiment, phase: Phase, devices: list[Any]) -> TracedProgram:
    """Trace one phase for the plan's devices, without weights."""
    xr.use_spmd()
    _add_operators()
    torch_xla._XLAC._set_xla_all_numbers_special_scalars(True)  # trace numbers as constants
    tensors = Tensors(experiment, phase)
    is_manual = experiment.program.partitioner is Partitioner.MANUAL
    attention = register_attention(tensors) if is_manual else "eager"
    model = meta_model(tensors, attention=attention)
    if experiment.model.moe is not None:
        model.config._experts_implementation = register_experts(tensors)
    if experiment.plan.cp > 1 and experiment.model.attention.mechanism is Mechanism.LATENT:
        for layer in model.model.layers:  # devices exchange latents, unexpanded
            layer.self_attn.expand_kv = lambda latent, rope: (latent, rope)
    drop_layers(model, experiment)
    constants = with_arguments(model, tensors)
    add_layouts(model, tensors)
    add_scopes(model, tensors)
    if tensors.layouts.has_region:
        add_region(model, tensors)
    for module, name, made, is_of_experts in tensors.made:
        # In the scope of the module when it is called; experts have none.
        part = Part.MOE_EXPERTS if is_of_experts else None
        module.register_forward_pre_hook(partial(_make, name=name, made=made, part=part))
    with torch.no_grad(), scope(phase.value):
        next_tokens, logits, cache = _traced(model, tensors)
    outputs = [next_tokens, logits, *cache.values()]
    proto = torch_xla._XLAC._get_xla_tensors_hlo_proto(outputs)
    tensors.position = None  # objects registered with transformers outlive the trace
    layouts = tensors.layouts
    rows: Spec = (layouts.data, (), ())
    specs = (rows[:1], rows, *(tensors.arguments[n].spec for n in cache))
    return TracedProgram(
        proto=proto,
        parameters=parameters_of(proto, ARGUMENT),
        shardings={name: layouts.sharding(a.spec) for name, a in tensors.arguments.items()},
        result_shardings=tuple(layouts.sharding(spec) for spec in specs),
        aliases={2 + number: name for number, name in enumerate(cache)},
        phase=phase,
        arguments=tensors.arguments,
        constants=constants,
        cache=tuple(cache),
        result_specs=specs,
        layouts=layouts,
        devices=devices,
    )


def _make(
    module: Any, _inputs: Any, *, name: str, made: Callable[[], Any], part: Part | None
) -> None:
    with nullcontext() if part is None else scope(part.value):
        module.__dict__[name] = made()


def _traced(model: Any, tensors: Tensors) -> tuple[Any, Any, dict[str, Any]]:
    """Next tokens [B], logits [B, 1, V] and the cache by name."""
    workload, streams = tensors.experiment.workload, tensors.streams
    n_tokens = 1 if tensors.is_decode else workload.prompt
    tokens = tensors.argument(TOKENS, (workload.batch, n_tokens), torch.int64, streams.tokens)
    position = tensors.argument(POSITION, (), torch.int64, ())
    tensors.position = position
    positions = position + torch.arange(n_tokens, device=torch_xla.device())
    cache, described = cache_arguments(tensors, position), tensors.experiment.model
    masks: Any = {"none": None}  # modules of compressed attention compare positions themselves
    if described.attention.mechanism is not Mechanism.COMPRESSED:
        kinds = dict.fromkeys(layer.attention for layer in described.layers)
        masks = {LAYER_TYPES[kind]: mask_of(tensors.experiment, positions, kind) for kind in kinds}
        if described.family.traits.layers is not LayerRule.WINDOWS:
            masks = next(iter(masks.values()))
    logits = model(
        input_ids=tokens,
        position_ids=positions[None],
        attention_mask=masks,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    with scope(Part.SAMPLE.value):
        next_tokens = logits[:, -1].argmax(dim=-1)
        tensors.annotate(next_tokens, streams.entered[:1])
    return next_tokens, logits, new_arrays(cache, tensors)


@cache
def _add_operators() -> torch.library.Library:
    """Register operators that transformers uses and torch_xla lacks, once per process.

    Without them torch_xla falls back to the host, which fails for tensors without memory.
    """

    def polar(magnitude: Any, angle: Any) -> Any:  # for the rotary embedding of DeepSeek-V2
        parts = torch.stack([magnitude * torch.cos(angle), magnitude * torch.sin(angle)], dim=-1)
        return torch.view_as_complex_copy(parts)  # below functionalization

    library = torch.library.Library("aten", "IMPL")
    library.impl("polar", polar, "XLA")
    return library


def _look_up_on_devices(model: Any, tensors: Tensors) -> None:
    """Look up tokens in a manual region: the partitioner moves ids, tables and rows in other ways than the plan.

    As in the JAX program, each device of tp has some rows of the table, whose columns fsdp splits.
    """
    embedding, plan, streams = model.model.embed_tokens, tensors.experiment.plan, tensors.streams

    def looked_up(tokens: Any) -> Any:
        spec = tensors.arguments[EMBEDDING].spec
        table = torch.nn.functional.pad(
            embedding.weight, (0, 0, 0, -embedding.weight.shape[0] % plan.tp)
        )
        table, tokens = tensors.entered(table, spec), tensors.entered(tokens, streams.tokens)
        if plan.fsdp > 1:
            table = all_gather(table, 1, tensors.groups("fsdp"))
        n_rows = table.shape[0]
        if plan.tp == 1:
            rows = table[tokens]
        else:
            local = tokens - tensors.rank("tp") * n_rows
            is_local = ((local >= 0) & (local < n_rows))[..., None]
            rows = table[local.clamp(0, n_rows - 1)]
            rows = tensors.summed_over_tp(torch.where(is_local, rows, torch.zeros_like(rows)))
        rows = tensors.left(rows, streams.residual)
        scale = getattr(embedding, "embed_scale", None)  # of Gemma
        return rows if scale is None else rows * scale.to(rows.dtype)

    embedding.forward = looked_up


def scope_of_module(name: str, tensors: Tensors) -> str | None:
    """The scope that a module adds; None if it adds none."""
    if name in _OUTER:
        return _OUTER[name].value
    match, model = _IN_LAYER.fullmatch(name), tensors.experiment.model
    if match is None:
        return None
    layer, inner = int(match[1]), match[2]
    if inner is None:
        return None if tensors.layouts.has_region else f"layer{layer}"
    kind = model.layers[layer]
    before_mlp = Part.MLP if kind.has_mlp else Part.MOE_ROUTER
    of_kind = {
        "post_attention_layernorm": Part.ATTN if model.has_post_norms else before_mlp,
        "pre_feedforward_layernorm": before_mlp,
        "post_feedforward_layernorm": Part.MOE_COMBINE if kind.has_experts else Part.MLP,
        "mlp": Part.MLP if kind.has_mlp else None,
        "mlp.gate": None if kind.has_mlp else Part.MOE_ROUTER,
    }
    part = of_kind.get(inner, _INNER.get(inner))
    return None if part is None else part.value


def add_scopes(model: Any, tensors: Tensors) -> None:
    """Add hooks that open a module's scope before its forward pass and close it afterwards.

    The selection of the last positions, between layers and head, is in the head's scope.
    """
    for name, module in model.named_modules():
        module_scope = scope_of_module(name, tensors)
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


def add_layouts(model: Any, tensors: Tensors) -> None:
    """Add hooks that shard the residual stream and the logits; call before `add_scopes`."""
    streams = tensors.streams
    if tensors.experiment.program.partitioner is Partitioner.MANUAL:
        _look_up_on_devices(model, tensors)
    else:
        _lay_out(model.model.embed_tokens, tensors, streams.residual)
    for layer in model.model.layers if not tensors.layouts.has_region else ():
        for block in (layer.self_attn, layer.mlp):
            _lay_out(block, tensors, streams.residual)
        if streams.split_dim is not None:  # the inputs of blocks are gathered
            for norm in norms_before_blocks(layer):
                _lay_out(norm, tensors, streams.residual, streams.entered)
    # A region returns only the last positions.
    if streams.split_dim is not None and not tensors.layouts.has_region:
        # Gathered by the head's product, each device's part of the batch would read the head again.
        gathered = (streams.entered,) if tensors.is_decode else ()
        _lay_out(model.model.norm, tensors, streams.residual, *gathered)
    _lay_out(model.lm_head, tensors, streams.logits, streams.rows)


def _lay_out(module: Any, tensors: Tensors, *specs: Spec) -> None:
    """Annotate the output of a module with one spec after another; the compiler reshards it."""

    def annotated(x: Any) -> Any:
        for spec in specs:
            tensors.annotate(x, spec)
        return x

    on_output(module, annotated)
