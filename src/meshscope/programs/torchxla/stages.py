"""The layers of a transformers model in a manual region over all devices: every collective is explicit.

A module replaces the layers. Weights and caches of the same layer of each stage are stacked, so that a device
has its stage's. Micro-batches follow GPipe (arXiv 1811.06965). As in the JAX program, a stage takes the
branch with its layers, or none if it is idle: a trace has no branches, so it has the results of all of them,
and `lowering.py` makes a conditional of the choice. cp splits positions.

Shapes: B batch, S positions of this step, D residual width, P stages, b one device's share of the batch, m its share
of a micro-batch.
"""

# pyright: reportMissingImports=false
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch_xla

from meshscope.events.enums import Part
from meshscope.model.layers import AttentionKind, MlpKind
from meshscope.plans.dispatch import exchange_axes
from meshscope.plans.experiment import Experiment
from meshscope.plans.stages import StageRun, n_ticks, stage_runs
from meshscope.programs.jax.pipeline import stages_scope
from meshscope.programs.torchxla.caching import StageLayer
from meshscope.programs.torchxla.configs import LAYER_TYPES
from meshscope.programs.torchxla.context import mask_of
from meshscope.programs.torchxla.models import norms_before_blocks
from meshscope.programs.torchxla.tensors import (
    Tensors,
    all_gather,
    all_reduce,
    chosen,
    on_output,
    permuted,
    scope,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What layers get in the manual region: their caches by index, what all get, and what each kind gets."""

    caches: Sequence[StageLayer]
    shared: dict[str, Any]
    of_kinds: dict[AttentionKind, dict[str, Any]]
    stage: Any

    @property
    def n_sequences(self) -> int:
        """Sequences of a device."""
        return self.slots[0].local["keys"].shape[0]

    @property
    def slots(self) -> list[StageLayer]:
        """The caches, each once: layers of different stages share them."""
        return list({id(cache): cache for cache in self.caches}.values())


class StagedModel(torch.nn.Module):
    """Replaces all layers by the stages'; a device runs one stage per tick. `layers` are by index."""

    def __init__(self, layers: dict[int, Any], tensors: Tensors, rotary: Any) -> None:
        super().__init__()
        self.experiment, self.streams = tensors.experiment, tensors.streams
        self.stage_layers = torch.nn.ModuleDict({str(i): layer for i, layer in layers.items()})
        self.tensors, self.rotary = tensors, rotary
        self.runs = stage_runs(self.experiment.model.layers, self.experiment.plan.pp)

    def forward(self, hidden_states: Any, *_: Any, **given: Any) -> Any:
        """[B, S, D] -> [B, 1, D], the last stage's output at the last positions."""
        tensors = self.tensors
        with scope(Part.EMBED.value):
            x = self._entered(hidden_states, *self.streams.residual[:2])
        inputs = self._inputs(hidden_states, given)
        with tensors.inside():
            out = self._ticks(x, inputs)
            with scope(Part.LM_HEAD.value):
                out = self._of_last(out)
        for cache in inputs.slots:
            cache.leave(tensors)
        return tensors.left(out, self.streams.rows)

    def _inputs(self, hidden_states: Any, given: dict[str, Any]) -> Inputs:
        tensors, model, positions = self.tensors, self.experiment.model, given["position_ids"]
        context = self.streams.tokens[1]
        of_kinds: dict[AttentionKind, dict[str, Any]] = {}
        for kind in dict.fromkeys(layer.attention for layer in model.layers):
            angles = given["position_embeddings"]
            if model.family.traits.variant == "gemma3":
                angles = self.rotary(hidden_states, positions, LAYER_TYPES[kind])
            of_kinds[kind] = {
                "attention_mask": self._entered(mask_of(self.experiment, positions[0], kind)),
                "position_embeddings": self._entered(angles, (), context),
            }
        as_they_are = {"past_key_values", "use_cache"} & set(given)
        inputs = Inputs(
            caches=given["past_key_values"].layers,
            shared={name: given[name] for name in as_they_are}
            | {"position_ids": self._entered(positions, (), context)},
            of_kinds=of_kinds,
            stage=tensors.rank("pp"),
        )
        for cache in inputs.slots:
            cache.enter(tensors)
        return inputs

    def _entered(self, x: Any, *spec: tuple[str, ...]) -> Any:
        """Arrays in the manual region, split in their first dimensions as `spec` says."""
        if isinstance(x, tuple):
            return tuple(self._entered(part, *spec) for part in x)
        return self.tensors.entered(x, (*spec, *((),) * (x.dim() - len(spec))))

    def _of_last(self, out: Any) -> Any:
        """Share the last stage's [b, 1, D] with all stages; one of its devices has it if a prompt is split."""
        tensors, plan = self.tensors, self.experiment.plan
        if self.streams.split_dim == 0:
            out = all_gather(out, 0, tensors.groups("tp"))
        is_cut = {
            "pp": plan.pp > 1,
            "cp": not tensors.is_decode and plan.cp > 1,
            "tp": self.streams.split_dim == 1,
        }
        axes = [axis for axis, is_of_axis in is_cut.items() if is_of_axis]
        if not axes:
            return out
        is_last = tensors.rank(*axes) == tensors.layouts.n_parts(tensors.layouts.axes(*axes)) - 1
        return all_reduce(torch.where(is_last, out, torch.zeros_like(out)), tensors.groups(*axes))

    def _ticks(self, x: Any, inputs: Inputs) -> Any:
        """[b, S, D] -> [b, 1, D], valid on the last stage."""
        n_stages = self.experiment.plan.pp
        if n_stages == 1:
            x = self._branch(self.runs[0], range(1), x, None, inputs)
            # A slice would pass its layout on to the layers, where XLA then all-reduces instead of reduce-scatters.
            is_last = torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1
            return torch.where(is_last[:, None], x, torch.zeros_like(x)).sum(dim=1, keepdim=True)
        n_parts = self.experiment.n_microbatches(self.tensors.phase)
        parts, lasts = x.reshape(n_parts, -1, *x.shape[1:]), list[Any]()
        ticks, coming = n_ticks(n_parts, n_stages), torch.zeros_like(parts[0])
        for tick in range(ticks):
            x = torch.where(inputs.stage == 0, parts[min(tick, n_parts - 1)], coming)
            x = self._tick(x, tick, n_parts, inputs)
            if tick >= n_stages - 1:
                lasts.append(x[:, -1:])
            if tick < ticks - 1:  # to the next stages
                pairs = tuple(
                    pair for group in self.tensors.groups("pp") for pair in pairwise(group)
                )
                with scope(stages_scope(range(n_stages - 1))), scope(Part.STAGE.value):
                    coming = permuted(x, pairs)
        return torch.cat(lasts)

    def _tick(self, x: Any, tick: int, n_parts: int, inputs: Inputs) -> Any:
        """The layers of the stages that have a micro-batch in this tick, whose residual stream is x [m, S, D]."""
        n_stages, stage, caches = self.experiment.plan.pp, inputs.stage, inputs.slots
        busy = range(max(0, tick - n_parts + 1), min(n_stages - 1, tick) + 1)
        # The rows of the stage's micro-batch among the device's rows.
        part, n_each = (tick - stage).clamp(0, n_parts - 1), inputs.n_sequences // n_parts
        before = [dict(cache.local) for cache in caches]
        number = torch.zeros_like(stage)
        # Outside a conditional, XLA gives activations a layout in which it has no reduce-scatter, and sends twice
        # the bytes in an all-reduce: every tick has the branch of idle stages, as in the JAX program.
        branches = [_results(x, caches)]
        for run in self.runs:
            stages = range(max(run.stages[0], busy[0]), min(run.stages[-1], busy[-1]) + 1)
            if not stages:
                continue
            is_here = (stage >= stages[0]) & (stage <= stages[-1])
            number = torch.where(is_here, len(branches), number)
            rows = part * n_each + torch.arange(n_each, device=torch_xla.device())
            branches.append(_results(self._branch(run, stages, x, rows, inputs), caches))
            for cache, held in zip(caches, before, strict=True):
                cache.local = dict(held)
        x, *results = chosen(number, *branches)
        for cache in caches:
            cache.local = {name: results.pop(0) for name in cache.local}
        return x

    def _branch(self, run: StageRun, stages: range, x: Any, rows: Any, inputs: Inputs) -> Any:
        """The layers of some stages of a run, for the sequences `rows` [m] of a micro-batch, or for all."""
        n_layers = len(run.kinds)
        first = run.first_layer + n_layers * (stages[0] - run.stages[0])
        is_pipeline = self.experiment.plan.pp > 1
        with scope(stages_scope(stages, n_layers=n_layers)) if is_pipeline else nullcontext():
            for number, kind in enumerate(run.kinds):
                index = run.first_layer + number
                inputs.caches[index].rows = rows
                with scope(f"layer{first + number}"):
                    given = inputs.of_kinds[kind.attention] | inputs.shared
                    x = self.stage_layers[str(index)](x, **given)
        return x


def _results(x: Any, caches: Sequence[StageLayer]) -> list[Any]:
    """What a branch returns: what stages send, and the arrays of all caches."""
    return [x, *(array for cache in caches for array in cache.local.values())]


def _traced_layers(experiment: Experiment) -> list[int]:
    """The layers of the first stage of each run."""
    runs = stage_runs(experiment.model.layers, experiment.plan.pp)
    return [run.first_layer + number for run in runs for number in range(len(run.kinds))]


def drop_layers(model: Any, experiment: Experiment) -> None:
    """Drop the layers that no stage traces; the others keep their names."""
    for index in {*range(experiment.model.n_layers)} - {*_traced_layers(experiment)}:
        model.model.layers[index] = torch.nn.Identity()


def add_region(model: Any, tensors: Tensors) -> None:
    """Replace the layers by the manual region, which keeps the layers of each run's first stage."""
    decoder, experiment = model.model, tensors.experiment
    layers = {index: decoder.layers[index] for index in _traced_layers(experiment)}
    if experiment.plan.tp > 1:
        for index, layer in layers.items():
            _add_collectives(layer, experiment.model.layers[index].mlp, tensors)
    decoder.layers = torch.nn.ModuleList([StagedModel(layers, tensors, decoder.rotary_emb)])


def _add_collectives(layer: Any, mlp: MlpKind, tensors: Tensors) -> None:
    """Sum the outputs of a layer's blocks over tp; sp splits the prompt or the batch of them, and gathers their inputs.

    A mixture whose rows are exchanged over tp takes and returns tokens of one device; its shared experts do not.
    """
    gathered, summed = tensors.gathered_over_tp, tensors.summed_over_tp
    of_attention, of_mlp = norms_before_blocks(layer)
    on_output(of_attention, gathered, is_first=True)
    on_output(layer.self_attn, summed, is_first=True)
    if mlp is MlpKind.DENSE:
        on_output(of_mlp, gathered, is_first=True)
        on_output(layer.mlp, summed, is_first=True)
    elif "tp" not in exchange_axes(tensors.experiment.plan):
        on_output(of_mlp, gathered, Part.MOE_DISPATCH, is_first=True)
        on_output(layer.mlp, summed, Part.MOE_COMBINE, is_first=True)
    elif hasattr(layer.mlp, "shared_experts"):
        # Gather the inputs of shared experts, and sum their outputs.
        def before(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            with scope(Part.MOE_SHARED.value):
                return (gathered(inputs[0]), *inputs[1:])

        layer.mlp.shared_experts.register_forward_pre_hook(before)
        on_output(layer.mlp.shared_experts, summed, Part.MOE_SHARED, is_first=True)
