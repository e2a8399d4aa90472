"""A pipeline around the layers of a transformers model, in a manual region over all devices.

A module replaces the layers. Weights and caches of the same layer of each stage are stacked, so that a device
has those of its stage. Micro-batches follow GPipe (arXiv 1811.06965). As in the JAX program, a stage takes the
branch with its layers, or none if it is idle: a trace has no branches, so it has the results of all of them,
and `branches.py` makes a conditional of the choice.

Shapes: B batch, S positions of this step, D residual width, P stages, b one device's share of the
batch, m that of a micro-batch, H width of a head.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch_xla

from meshscope.events.enums import Part, Phase
from meshscope.programs.jax.pipeline import stages_scope
from meshscope.programs.torchxla.configs import LAYER_TYPES
from meshscope.programs.torchxla.context import mask_of
from meshscope.programs.torchxla.layouts import residual_specs
from meshscope.programs.torchxla.models import attention_of, feed_forward, norms_before_blocks
from meshscope.programs.torchxla.replaced import with_local_heads
from meshscope.programs.torchxla.staged_caches import STAGES, StageArrays
from meshscope.programs.torchxla.tensors import (
    Tensors,
    all_gather,
    all_reduce,
    chosen,
    permuted,
    reduce_scatter,
    scope,
)
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import AttentionKind, Family, MlpKind
from meshscope.spec.plan.stages import StageRun, n_ticks, stage_runs

ROTARY_BY_KIND = {Family.GEMMA3, Family.GEMMA4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What layers get in the manual region: their caches by index, what all get, and what those of each kind get."""

    caches: Sequence[StageArrays]
    shared: dict[str, Any]
    of_kinds: dict[AttentionKind, dict[str, Any]]
    stage: Any

    @property
    def slots(self) -> list[StageArrays]:
        """The caches, each once: layers of different stages share them."""
        return list({id(cache): cache for cache in self.caches}.values())


class StagedModel(torch.nn.Module):
    """Replaces all layers by those of the stages, of which a device runs one per tick; `layers` are by index."""

    def __init__(
        self,
        layers: dict[int, Any],
        experiment: Experiment,
        phase: Phase,
        tensors: Tensors,
        rotary: Any,
    ) -> None:
        super().__init__()
        self.stage_layers = torch.nn.ModuleDict({str(i): layer for i, layer in layers.items()})
        self.experiment, self.phase, self.tensors = experiment, phase, tensors
        self.rotary = rotary
        self.runs = stage_runs(experiment.model.layers, experiment.plan.pp)
        self.streams = residual_specs(experiment, phase, tensors.layouts)

    def forward(self, hidden_states: Any, *_: Any, **given: Any) -> Any:
        """[B, S, D] -> [B, 1, D], the last stage's output at the last positions."""
        tensors = self.tensors
        with scope(Part.EMBED.value):
            x = tensors.entered(hidden_states, self.streams.residual)
        inputs = self._inputs(hidden_states, given)
        with tensors.inside():
            out = self._ticks(x, inputs)
            with scope(Part.LM_HEAD.value):
                out = self._of_last(out, inputs.stage)
        for cache in inputs.slots:
            cache.leave(tensors)
        return tensors.left(out, self.streams.rows)

    def _inputs(self, hidden_states: Any, given: dict[str, Any]) -> Inputs:
        """The inputs of layers, in the manual region."""
        tensors, positions = self.tensors, given["position_ids"]
        kinds = dict.fromkeys(layer.attention for layer in self.experiment.model.layers)
        of_kinds: dict[AttentionKind, dict[str, Any]] = {}
        for kind in kinds:
            mask, angles = (
                mask_of(self.experiment, positions[0], kind),
                given["position_embeddings"],
            )
            if self.experiment.model.family in ROTARY_BY_KIND:
                angles = self.rotary(hidden_states, positions, LAYER_TYPES[kind])
            of_kinds[kind] = {
                "attention_mask": self._entered(mask),
                "position_embeddings": self._entered(angles),
            }
        ranks = torch.arange(self.experiment.plan.pp, device=torch_xla.device())
        passed = {"past_key_values", "shared_kv_states", "use_cache"} & set(given)
        inputs = Inputs(
            caches=given["past_key_values"].layers,
            shared={name: given[name] for name in passed}
            | {"position_ids": self._entered(positions)},
            of_kinds=of_kinds,
            stage=tensors.entered(ranks, (STAGES,)),
        )
        for cache in inputs.slots:
            cache.enter(tensors)
        return inputs

    def _entered(self, x: Any) -> Any:
        """Arrays that all devices have, in the manual region."""
        if isinstance(x, tuple):
            return tuple(self._entered(part) for part in x)
        return None if x is None else self.tensors.entered(x, ((),) * x.dim())

    def _of_last(self, out: Any, stage: Any) -> Any:
        """Share the last stage's [b, 1, D] with all stages; with sp, one or all of its devices have it."""
        tensors, plan = self.tensors, self.experiment.plan
        is_last, axes = stage == plan.pp - 1, ("pp",)
        if self.streams.is_split and self.phase is Phase.PREFILL:
            is_last, axes = is_last & (tensors.rank("tp") == plan.tp - 1), ("pp", "tp")
        elif self.streams.is_split:
            out = all_gather(out, 0, tensors.groups("tp"))
        return all_reduce(torch.where(is_last, out, torch.zeros_like(out)), tensors.groups(*axes))

    def _ticks(self, x: Any, inputs: Inputs) -> Any:
        """[b, S, D] -> [b, 1, D], valid on the last stage."""
        n_stages, n_parts = self.experiment.plan.pp, self.experiment.n_microbatches(self.phase)
        parts = x.reshape(n_parts, -1, *x.shape[1:])
        ticks = n_ticks(n_parts, n_stages)
        coming, lasts = torch.zeros_like(parts[0]), list[Any]()
        for tick in range(ticks):
            y = torch.where(inputs.stage == 0, parts[min(tick, n_parts - 1)], coming)
            y = self._tick(y, tick, n_parts, inputs)
            if tick >= n_stages - 1:
                lasts.append(y[:, -1:])
            if tick < ticks - 1:
                coming = self._send_to_next_stage(y)
        return torch.cat(lasts)

    def _tick(self, x: Any, tick: int, n_parts: int, inputs: Inputs) -> Any:
        """[m, S, D] -> [m, S, D]: the layers of the stages that have a micro-batch in this tick."""
        n_stages, stage, caches = self.experiment.plan.pp, inputs.stage, inputs.slots
        busy = range(max(0, tick - n_parts + 1), min(n_stages - 1, tick) + 1)
        n_rows = next(iter(caches[0].local.values())).shape[0] // n_parts
        first = (tick - stage).clamp(0, n_parts - 1) * n_rows
        rows = first + torch.arange(n_rows, device=torch_xla.device())
        before = [dict(cache.local) for cache in caches]
        number, branches = torch.zeros_like(stage), list[list[Any]]()
        if len(busy) < n_stages:
            branches.append(_results(x, caches))
        for run in self.runs:
            stages = range(max(run.stages[0], busy[0]), min(run.stages[-1], busy[-1]) + 1)
            if not stages:
                continue
            is_here = (stage >= stages[0]) & (stage <= stages[-1])
            number = torch.where(is_here, len(branches), number)
            branches.append(_results(self._branch(run, stages, x, rows, inputs), caches))
            for cache, held in zip(caches, before, strict=True):
                cache.local = dict(held)
        x, *arrays = chosen(number, *branches) if len(branches) > 1 else branches[0]
        for cache in caches:
            cache.local = {name: arrays.pop(0) for name in cache.local}
        return x

    def _branch(self, run: StageRun, stages: range, x: Any, rows: Any, inputs: Inputs) -> Any:
        """The layers of some stages of a run, for the sequences `rows`."""
        n_layers = len(run.kinds)
        first = run.first_layer + n_layers * (stages[0] - run.stages[0])
        with scope(stages_scope(stages, n_layers=n_layers)):
            for number, kind in enumerate(run.kinds):
                index = run.first_layer + number
                cache, layer = inputs.caches[index], self.stage_layers[str(index)]
                with scope(f"layer{first + number}"):
                    cache.start(rows)
                    x = layer(x, **inputs.of_kinds[kind.attention], **inputs.shared)
                    cache.stop()
        return x

    def _send_to_next_stage(self, x: Any) -> Any:
        """Permute activations to the next stage."""
        n_stages = self.experiment.plan.pp
        name = "stage0" if n_stages == 2 else f"stages0-{n_stages - 2}"
        groups = self.tensors.groups("pp")
        pairs = tuple(pair for group in groups for pair in pairwise(group))
        with scope(name), scope(Part.STAGE.value):
            return permuted(x, pairs)


def _results(x: Any, caches: Sequence[StageArrays]) -> list[Any]:
    """What a branch returns: activations and the arrays of all caches."""
    return [x, *(array for cache in caches for array in cache.local.values())]


def _traced_layers(experiment: Experiment) -> list[int]:
    """The layers of the first stage of each run."""
    return [
        run.first_layer + number
        for run in stage_runs(experiment.model.layers, experiment.plan.pp)
        for number in range(len(run.kinds))
    ]


def drop_layers(model: Any, experiment: Experiment) -> None:
    """Drop the layers that no stage traces; the others keep their names."""
    for index in {*range(experiment.model.n_layers)} - {*_traced_layers(experiment)}:
        model.model.layers[index] = torch.nn.Identity()


def add_pipeline(model: Any, experiment: Experiment, phase: Phase, tensors: Tensors) -> None:
    """Replace the layers by the pipeline, which keeps those of the first stage of each run."""
    layers = {index: model.model.layers[index] for index in _traced_layers(experiment)}
    for index, layer in layers.items():
        with_local_heads(attention_of(layer), experiment.plan)
        if experiment.plan.tp > 1:
            mlp = experiment.model.layers[index].mlp
            _add_collectives(layer, mlp, tensors, _split_dim(experiment, phase, tensors))
    _gather_when_used(tensors)
    pipeline = StagedModel(layers, experiment, phase, tensors, model.model.rotary_emb)
    model.model.layers = torch.nn.ModuleList([pipeline])


def _split_dim(experiment: Experiment, phase: Phase, tensors: Tensors) -> int | None:
    """The dimension of the residual stream that sp splits: the prompt, or the batch."""
    is_split = residual_specs(experiment, phase, tensors.layouts).is_split
    return (1 if phase is Phase.PREFILL else 0) if is_split else None


def _add_collectives(layer: Any, mlp: MlpKind, tensors: Tensors, dim: int | None) -> None:
    """Sum the outputs of a layer's blocks over tp; sp splits `dim` of them, and gathers their inputs."""
    groups = tensors.groups("tp")

    def summed(x: Any) -> Any:
        return all_reduce(x, groups) if dim is None else reduce_scatter(x, dim, groups)

    blocks: list[tuple[Any, Part | None]] = [(attention_of(layer), None)]
    if mlp is MlpKind.DENSE_AND_MOE:
        blocks.append((layer.mlp, None))
        _add_to_experts(layer, summed, tensors, dim)
    else:
        of_mlp = None if mlp is MlpKind.DENSE else Part.MOE_COMBINE
        blocks.append((feed_forward(layer), of_mlp))
    for block, part in blocks:
        _add_behind(block, summed, part)
    if dim is not None:
        for norm in norms_before_blocks(layer):
            _add_behind(norm, lambda x: all_gather(x, dim, groups))


def _add_to_experts(
    layer: Any, summed: Callable[[Any], Any], tensors: Tensors, dim: int | None
) -> None:
    """Gather the residual stream for experts beside an MLP, which read it before any norm, and sum their outputs."""
    whole: list[Any] = []

    def of_stream(_module: Any, inputs: tuple[Any, ...]) -> None:
        with scope(Part.MOE_DISPATCH.value):
            x = inputs[0] if dim is None else all_gather(inputs[0], dim, tensors.groups("tp"))
            whole[:] = [x]

    def gathered(_module: Any, _inputs: tuple[Any, ...]) -> Any:
        return whole[0].flatten(0, 1)

    layer.pre_feedforward_layernorm.register_forward_pre_hook(of_stream)
    for reader in (layer.router, layer.pre_feedforward_layernorm_2):
        reader.register_forward_pre_hook(gathered)
    _add_behind(
        layer.experts,
        lambda x: summed(x.reshape(whole[0].shape)).flatten(0, 1),
        Part.MOE_COMBINE,
    )


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
