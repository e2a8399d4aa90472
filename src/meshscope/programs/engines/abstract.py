"""An engine's model on abstract weights, with the scopes of phase, layer and part around its modules.

No file of the engine changes: the classes' `__call__` enters the scope that belongs to the module's
path in the model, such as `model.layers.3.self_attn`.
"""

# pyright: reportMissingImports=false
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import prod
from typing import Any

import jax
from flax import nnx

from meshscope.events.enums import Part
from meshscope.programs.frontends import EngineProgram, StepPrograms

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
# The first pattern that the end of a module's path matches gives the part.
PARTS: tuple[tuple[str, Part], ...] = (
    (r"(^|\.)embed(der|_tokens)?$", Part.EMBED),
    (r"(^|\.)(lm_head|logits_processor)$", Part.LM_HEAD),
    (r"(^|\.)layers\.\d+\.(self_attn|attn|input_layernorm|pre_attention_norm)$", Part.ATTN),
    (r"(^|\.)(gate|router|moe_gate|topk)$", Part.MOE_ROUTER),
    (r"(^|\.)shared_experts$", Part.MOE_SHARED),
    (r"(^|\.)(mlp|custom_module)\.experts$", Part.MOE_EXPERTS),
    (r"(^|\.)combine_experts$", Part.MOE_COMBINE),
    (r"(^|\.)layers\.\d+\.custom_module$", Part.MOE_EXPERTS),  # gpt-oss: router and experts
    (r"(^|\.)layers\.\d+\.(mlp|post_attention_layernorm|pre_mlp_norm)$", Part.MLP),
    (r"^((model|transformer)\.norm|final_norm)$", Part.LM_HEAD),
)
# Methods of a module that do its work; gpt-oss looks up embeddings and logits under other names.
METHODS = ("__call__", "encode", "decode")
# The class of SGLang-JAX whose instances, by the name of a dense MLP, are all experts of a layer; its
# method sums their results over devices.
EXPERTS, COMBINE = "EPMoE", "_combine"

_scope_of_module: dict[int, str] = {}
_wrapped: set[type] = set()


def engine_step(
    functions: Mapping[str, tuple[Any, ...]],
    mesh: Any,
    resident: Any,
    *,
    without_mesh: tuple[str, ...] = (),
) -> StepPrograms:
    """The programs of a step: jitted functions, each followed by its abstract arguments.

    They are traced under `mesh` unless they enter it themselves. `resident` are the weights and caches.
    """
    devices = list(mesh.devices.flat)
    programs = {
        name: EngineProgram(
            function=function,
            arguments=tuple(arguments),
            context=nullcontext if name in without_mesh else lambda: jax.set_mesh(mesh),
        )
        for name, (function, *arguments) in functions.items()
    }
    n_bytes = sum(
        prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(resident)
    )
    return StepPrograms(programs=programs, devices=devices, resident_bytes=n_bytes)


def abstract_model(
    model: Any, placed: Callable[[Any], Any]
) -> tuple[Callable[[Any], Any], list[Any]]:
    """A function that merges leaves into the model with scopes, and the leaves that `placed` gives the state."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(placed(state))
    return lambda leaves: _with_scopes(nnx.merge(graph, treedef.unflatten(leaves))), leaves


def known_options(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The options that the function has in this release."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def _with_scopes(model: Any) -> Any:
    """The model, whose modules enter their scopes when they are called.

    A module with experts has no scope itself: its router and its experts are parts.
    """
    iterate = getattr(nnx, "iter_modules", None)  # a method in flax 0.11
    nodes = model.iter_modules() if iterate is None else iterate(model)
    modules = {".".join(map(str, path)): module for path, module in nodes}
    for path, module in modules.items():
        parts = (part.value for pattern, part in PARTS if re.search(pattern, path))
        scope = None if f"{path}.experts" in modules else next(parts, None)
        if match := _LAYER.search(path):
            scope = f"layer{match[1]}"
        if type(module).__name__ == EXPERTS:
            scope = Part.MOE_EXPERTS.value
        if scope is not None:
            _scope_of_module[id(module)] = scope
            _wrap(type(module))
    return model


def _wrap(kind: type) -> None:
    """Makes calls of instances enter the scope of the instance; once for each class."""
    if kind in _wrapped:
        return
    _wrapped.add(kind)
    for name in METHODS:
        method = getattr(kind, name, None)
        if inspect.isfunction(method):
            setattr(kind, name, _scoped(method))
    if kind.__name__ == EXPERTS and hasattr(kind, COMBINE):  # not in 0.0.2
        setattr(kind, COMBINE, jax.named_scope(Part.MOE_COMBINE.value)(getattr(kind, COMBINE)))


def _scoped(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def scoped(self: Any, *arguments: Any, **options: Any) -> Any:
        scope = _scope_of_module.get(id(self))
        with nullcontext() if scope is None else jax.named_scope(scope):
            return method(self, *arguments, **options)

    return scoped
