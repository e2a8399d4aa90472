"""Hooks on a transformers model that open named scopes and shard the residual stream.

The scopes are phase, layer and part, as in all programs (`readers/hlo/attribution.py`). Hooks run
in registration order, so sharding annotations carry the scope of their module.
"""

import re
from collections.abc import Callable
from typing import Any

from meshscope.events.enums import Part, Phase
from meshscope.programs.torchxla.layouts import Spec, residual_specs
from meshscope.programs.torchxla.tensors import Tensors, scope
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import MlpKind

_IN_LAYER = re.compile(r"model\.layers\.(\d+)(?:\.(.+))?")
_OUTER = {
    "model.embed_tokens": Part.EMBED,
    "model.norm": Part.LM_HEAD,
    "lm_head": Part.LM_HEAD,
}


def scope_of_module(name: str, experiment: Experiment) -> str | None:
    """The scope that a module adds; None if it adds none."""
    if name in _OUTER:
        return _OUTER[name].value
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return None
    layer, inner = int(match[1]), match[2]
    if inner is None:
        return f"layer{layer}"
    is_dense = experiment.model.layers[layer].mlp is MlpKind.DENSE
    of_inner = {
        "input_layernorm": Part.ATTN,
        "self_attn": Part.ATTN,
        "post_attention_layernorm": Part.MLP if is_dense else Part.MOE_ROUTER,
        "mlp": Part.MLP if is_dense else None,
        "mlp.gate": Part.MOE_ROUTER,
        "mlp.shared_experts": Part.MOE_SHARED,
    }
    part = of_inner.get(inner)
    return None if part is None or (inner == "mlp.gate" and is_dense) else part.value


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
    """The hooks that open and close a scope."""
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
    _lay_out(model.model.embed_tokens, tensors, streams.residual)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            _lay_out(block, tensors, streams.residual)
        if streams.is_split:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                _lay_out(norm, tensors, streams.residual, streams.entered)
    if streams.is_split and experiment.plan.pp == 1:  # a pipeline returns only the last positions
        _lay_out(model.model.norm, tensors, streams.residual)
    _lay_out(model.lm_head, tensors, streams.logits, streams.rows)


def _lay_out(module: Any, tensors: Tensors, *specs: Spec) -> None:
    """Annotate the output of a module with one spec after another; the compiler reshards it."""

    def behind(_module: Any, _inputs: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        for spec in specs:
            tensors.annotate(x, spec)
        return output

    module.register_forward_hook(behind)
