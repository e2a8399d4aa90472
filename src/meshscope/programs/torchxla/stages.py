"""A pipeline around the layers of a transformers model, in a manual region over all devices.

A module replaces the layers and holds those of one stage; weights are stacked over the stages, so
that each device has those of its stage. Micro-batches follow GPipe (arXiv 1811.06965). A trace has
no branches: every stage computes on every tick, also its tp collectives, and results of idle stages
are dropped. If a layer has a window in some stages only, its mask is selected by the stage.

Shapes: B batch, S positions of this step, D residual width, P stages, b one device's share of the
batch, m that of a micro-batch, K key and value heads, T slots, H width.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch_xla
from transformers.cache_utils import StaticLayer

from meshscope.events.enums import Part, Phase
from meshscope.programs.torchxla.checks import layers_of_stage
from meshscope.programs.torchxla.context import is_seen
from meshscope.programs.torchxla.layouts import Spec, residual_specs
from meshscope.programs.torchxla.models import norms_before_blocks
from meshscope.programs.torchxla.tensors import (
    Tensors,
    all_gather,
    all_reduce,
    permuted,
    reduce_scatter,
    scope,
)
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.flops import window_of
from meshscope.spec.model.model import AttentionKind, MlpKind
from meshscope.spec.plan.stages import n_ticks

STAGES = ("pp",)


@dataclass(slots=True, kw_only=True)
class Turn:
    """One tick: the sequences [m] of the device's batch, and whether the stage is busy."""

    rows: Any
    is_busy: Any


class StageLayer(StaticLayer):
    """The cache of one layer per stage: arrays [P, B, K, T, H], of which a device has [b, k, T, H]."""

    def __init__(self, n_slots: int, position: Any) -> None:
        super().__init__(max_cache_len=n_slots)
        self.position = position
        self.turn: Turn | None = None
        self.local: list[Any] = []

    def enter(self, tensors: Tensors, spec: Spec) -> None:
        """Enter the manual region with this device's shard of the arrays."""
        arrays: tuple[Any, Any] = (self.keys, self.values)
        self.local = [tensors.entered(array, spec)[0] for array in arrays]

    def leave(self, tensors: Tensors, spec: Spec) -> None:
        """Leave the manual region with the whole arrays."""
        self.keys, self.values = (tensors.left(array[None], spec) for array in self.local)

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The cached keys and values of the micro-batch, including those of this step."""
        turn = self.turn
        assert turn is not None
        places = self.position + torch.arange(key_states.shape[2], device=torch_xla.device())
        seen: list[Any] = []
        for number, x in enumerate((key_states, value_states)):
            held = self.local[number]
            before = held.index_select(0, turn.rows)
            now = before.index_copy(2, places, x)
            kept = torch.where(turn.is_busy, now, before)  # an idle stage writes nothing
            self.local[number] = held.index_copy(0, turn.rows, kept)
            seen.append(now)
        return seen[0], seen[1]


class StagedModel(torch.nn.Module):
    """Replaces all layers by those of one stage, run once per tick."""

    def __init__(
        self,
        layers: list[Any],
        experiment: Experiment,
        phase: Phase,
        tensors: Tensors,
    ) -> None:
        super().__init__()
        self.stage_layers = torch.nn.ModuleList(layers)
        self.experiment, self.phase, self.tensors = experiment, phase, tensors
        self.streams = residual_specs(experiment, phase, tensors.layouts)

    def forward(self, hidden_states: Any, **given: Any) -> Any:
        """[B, S, D] -> [B, 1, D], the last stage's output at the last positions."""
        tensors = self.tensors
        with scope(Part.EMBED.value):
            x = tensors.entered(hidden_states, self.streams.residual)
        cache = given["past_key_values"]
        cache_spec: Spec = (STAGES, *self._cache_spec)
        for layer in cache.layers:
            layer.position = tensors.entered(tensors.position, ())
            layer.enter(tensors, cache_spec)
        inside = {
            "position_embeddings": tuple(
                tensors.entered(x, ((), (), ())) for x in given["position_embeddings"]
            ),
            "past_key_values": cache,
            "use_cache": True,
            "position_ids": tensors.entered(given["position_ids"], ((), ())),
        }
        ranks = torch.arange(self.experiment.plan.pp, device=torch_xla.device())
        stage = tensors.entered(ranks, (STAGES,))
        masks = self._masks(given["position_ids"][0], given["attention_mask"])
        masks_of_layers = [self._mask(i, stage, masks) for i in range(len(self.stage_layers))]
        with tensors.inside():
            out = self._ticks(x, stage, inside, masks_of_layers)
            with scope(Part.LM_HEAD.value):
                out = self._of_last(out, stage)
        for layer in cache.layers:
            layer.leave(tensors, cache_spec)
        return tensors.left(out, self.streams.rows)

    def _masks(self, positions: Any, mask: Any) -> dict[AttentionKind, Any]:
        """The mask [1, 1, S, T] of layers of each kind, in the manual region; `mask` has its dtype and slots."""
        model = self.experiment.model
        slots = torch.arange(mask.shape[-1], device=torch_xla.device())
        masks: dict[AttentionKind, Any] = {}
        for kind in dict.fromkeys(layer.attention for layer in model.layers):
            is_hidden = ~is_seen(positions, slots, window_of(model.attention, kind))
            added = (is_hidden.to(mask.dtype) * torch.finfo(mask.dtype).min)[None, None]
            masks[kind] = self.tensors.entered(added, ((), (), (), ()))
        return masks

    def _mask(self, index: int, stage: Any, masks: dict[AttentionKind, Any]) -> Any:
        """The mask of layer `index` of this device's stage."""
        layers = self.experiment.model.layers[index :: len(self.stage_layers)]
        chosen = masks[layers[0].attention]
        for number, layer in enumerate(layers):
            if layer.attention is not layers[0].attention:
                chosen = torch.where(stage == number, masks[layer.attention], chosen)
        return chosen

    def _of_last(self, out: Any, stage: Any) -> Any:
        """Share the last stage's [b, 1, D] with all stages; with sp, one or all of its devices have it."""
        tensors, plan = self.tensors, self.experiment.plan
        is_last, axes = stage == plan.pp - 1, ("pp",)
        if self.streams.is_split and self.phase is Phase.PREFILL:
            is_last, axes = is_last & (tensors.rank("tp") == plan.tp - 1), ("pp", "tp")
        elif self.streams.is_split:
            out = all_gather(out, 0, tensors.groups("tp"))
        return all_reduce(torch.where(is_last, out, torch.zeros_like(out)), tensors.groups(*axes))

    @property
    def _cache_spec(self) -> Spec:
        from meshscope.programs.torchxla.caching import kept  # noqa: PLC0415  circular import

        return kept(self.experiment, self.tensors, self.experiment.model.layers[0]).spec

    def _ticks(self, x: Any, stage: Any, given: dict[str, Any], masks: list[Any]) -> Any:
        """[b, S, D] -> [b, 1, D], valid on the last stage."""
        n_stages, device = self.experiment.plan.pp, torch_xla.device()
        n_parts = self.experiment.n_microbatches(self.phase)
        parts = x.reshape(n_parts, -1, *x.shape[1:])
        n_rows = given["past_key_values"].layers[0].local[0].shape[0] // n_parts
        ticks = n_ticks(n_parts, n_stages)
        coming, lasts = torch.zeros_like(parts[0]), list[Any]()
        for tick in range(ticks):
            index = tick - stage
            is_busy = (index >= 0) & (index < n_parts)
            rows = index.clamp(0, n_parts - 1) * n_rows + torch.arange(n_rows, device=device)
            y = torch.where(stage == 0, parts[min(tick, n_parts - 1)], coming)
            n_layers = len(self.stage_layers)
            with (
                scope(f"stages0-{n_stages - 1}by{n_layers}"),
                scope(f"microbatches{ticks}of{ticks}"),
            ):
                for layer, cached, mask in zip(
                    self.stage_layers, given["past_key_values"].layers, masks, strict=True
                ):
                    cached.turn = Turn(rows=rows, is_busy=is_busy)
                    y = layer(y, attention_mask=mask, **given)
            if tick >= n_stages - 1:
                lasts.append(y[:, -1:])
            if tick < ticks - 1:
                coming = self._send_to_next_stage(y)
        return torch.cat(lasts)

    def _send_to_next_stage(self, x: Any) -> Any:
        """Permute activations to the next stage."""
        n_stages = self.experiment.plan.pp
        name = "stage0" if n_stages == 2 else f"stages0-{n_stages - 2}"
        groups = self.tensors.groups("pp")
        pairs = tuple(pair for group in groups for pair in pairwise(group))
        with scope(name), scope(Part.STAGE.value):
            return permuted(x, pairs)


def add_pipeline(model: Any, experiment: Experiment, phase: Phase, tensors: Tensors) -> None:
    """Replace the layers by the pipeline, which keeps the layers of the first stage."""
    n_layers = layers_of_stage(experiment)
    layers = list(model.model.layers)[:n_layers]
    dim = 1 if phase is Phase.PREFILL else 0  # what sp splits: the prompt, or the batch
    is_split = residual_specs(experiment, phase, tensors.layouts).is_split
    groups = tensors.groups("tp")
    for layer, kind in zip(layers, experiment.model.layers, strict=False):
        of_mlp = None if kind.mlp is MlpKind.DENSE else Part.MOE_COMBINE
        for block, part in ((layer.self_attn, None), (layer.mlp, of_mlp)):
            if is_split:
                _add_behind(block, lambda x: reduce_scatter(x, dim, groups), part)
            elif experiment.plan.tp > 1:
                _add_behind(block, lambda x: all_reduce(x, groups), part)
        if is_split:
            for norm in norms_before_blocks(layer):
                _add_behind(norm, lambda x: all_gather(x, dim, groups))
    _gather_when_used(tensors)
    pipeline = StagedModel(layers, experiment, phase, tensors)
    model.model.layers = torch.nn.ModuleList([pipeline])


def _add_behind(block: Any, collective: Callable[[Any], Any], part: Part | None = None) -> None:
    """Add a collective on a block's output, in the block's scope or in that of `part`."""

    def behind(_module: Any, _inputs: Any, output: Any) -> Any:
        with nullcontext() if part is None else scope(part.value):
            if isinstance(output, tuple):
                return (collective(output[0]), *output[1:])
            return collective(output)

    block.register_forward_hook(behind, prepend=True)


def _gather_when_used(tensors: Tensors) -> None:
    """All-gather weights that fsdp splits when their module is called, in its scope."""
    for module, name, whole in tensors.shares:

        def before(*_: Any, module: Any = module, name: str = name, whole: Any = whole) -> None:
            module.__dict__[name] = whole()

        module.register_forward_pre_hook(before)
