"""Module names become scopes, and residual streams get their layout: hooks on a transformers model.

The scopes are those of every program (`hlo/attribution.py`): phase, layer, part. Hooks run in the
order in which they are registered, so that what is laid out carries the scope of its module.
"""

import re
from collections.abc import Callable
from typing import Any

from meshscope.events.enums import Part, Phase
from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.residual import streams_of
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
    """The scope that a module adds to those around it; None for one that adds nothing."""
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
    """Hooks that open a module's scope before its forward, and close it behind.

    The last positions are taken between the layers and the head: that is the head's, too.
    """
    for name, module in model.named_modules():
        own = scope_of_module(name, experiment)
        if own is not None and module is not model.lm_head:
            before, behind = _brackets(own)
            module.register_forward_pre_hook(before)
            module.register_forward_hook(behind)
    before, behind = _brackets(Part.LM_HEAD.value)
    model.model.register_forward_hook(before)
    model.lm_head.register_forward_hook(behind)


def _brackets(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """What opens a scope, and what closes it."""
    opened: list[Any] = []

    def before(*_: Any) -> None:
        opened.append(scope(name))
        opened[-1].__enter__()

    def behind(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    return before, behind


def add_layouts(model: Any, experiment: Experiment, phase: Phase, tensors: Tensors) -> None:
    """Hooks that lay out the residual stream between blocks, and the logits; before the scopes' own."""
    streams = streams_of(experiment, phase, tensors.layouts)
    _lay_out(model.model.embed_tokens, tensors, streams.residual)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            _lay_out(block, tensors, streams.residual)
        if streams.is_split:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                _lay_out(norm, tensors, streams.residual, streams.entered)
    if (
        streams.is_split and experiment.plan.pp == 1
    ):  # out of a pipeline come the last positions alone
        _lay_out(model.model.norm, tensors, streams.residual)
    _lay_out(model.lm_head, tensors, streams.logits, streams.rows)


def _lay_out(module: Any, tensors: Tensors, *specs: Spec) -> None:
    """The output of a module laid out as one spec says, then as the next: the compiler moves it there."""

    def behind(_module: Any, _inputs: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        for spec in specs:
            tensors.annotate(x, spec)
        return output

    module.register_forward_hook(behind)
