"""A pipeline around the layers of a transformers model, in a manual region over all devices.

A module replaces the layers. Weights and caches of the same layer of each stage are stacked, so that a device
has its stage's. Micro-batches follow GPipe (arXiv 1811.06965). As in the JAX program, a stage takes the
branch with its layers, or none if it is idle: a trace has no branches, so it has the results of all of them,
and `lowering.py` makes a conditional of the choice. cp splits positions in the same region.

Stages also send the keys and values of the step that layers of later stages share. A stage writes those that it
receives to the cache of a layer that it does not have, as in the JAX program. All stages compute the embeddings of
layers, so these are not sent.

Shapes: B batch, S positions of this step, D residual width, P stages, b one device's share of the batch, m its share
of a micro-batch.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch_xla

from meshscope.events.enums import Part
from meshscope.model.layers import AttentionKind, Layer, MlpKind
from meshscope.plans.dispatch import exchange_axes
from meshscope.plans.experiment import Experiment
from meshscope.plans.stages import (
    StageRun,
    caches_before,
    n_ticks,
    shared_slot,
    stage_runs,
    stage_sends,
)
from meshscope.programs.jax.pipeline import stages_scope
from meshscope.programs.torchxla.caching import ARRAYS, STAGES, StageLayer
from meshscope.programs.torchxla.configs import LAYER_TYPES
from meshscope.programs.torchxla.context import mask_of
from meshscope.programs.torchxla.models import attention_of, feed_forward, norms_before_blocks
from meshscope.programs.torchxla.replaced import with_local_heads
from meshscope.programs.torchxla.tensors import (
    Tensors,
    all_gather,
    all_reduce,
    chosen,
    of_all,
    on_output,
    permuted,
    reduce_scatter,
    scope,
    share_stream,
)

ROTARY_BY_KIND = {"gemma3", "gemma4"}  # variants of families
SHARED_EXPERTS = ("shared_expert", "shared_experts")
RESIDUAL = "residual"

Values = dict[str, Any]  # the residual stream, and keys and values [m, K, S, H] of kinds of layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What layers get in the manual region: their caches by index, what all get, and what each kind gets.

    Some models share keys and values between layers. `of_layers` [b, S, layers, width], the embeddings of layers, are
    None if no layer reads them.
    """

    caches: Sequence[StageLayer]
    has_shared_keys: bool
    shared: dict[str, Any]
    of_kinds: dict[AttentionKind, dict[str, Any]]
    of_layers: Any
    stage: Any

    @property
    def n_sequences(self) -> int:
        """Sequences of a device."""
        return next(iter(self.slots[0].local.values())).shape[0]

    @property
    def slots(self) -> list[StageLayer]:
        """The caches, each once: layers of different stages share them."""
        return list({id(cache): cache for cache in self.caches}.values())


class StagedModel(torch.nn.Module):
    """Replaces all layers by the stages'; a device runs one stage per tick. `layers` are by index.

    `of_layers` are the embeddings [B, S, layers, width] of layers, if the model has them.
    """

    def __init__(
        self,
        layers: dict[int, Any],
        tensors: Tensors,
        rotary: Any,
    ) -> None:
        super().__init__()
        experiment, self.streams = tensors.experiment, tensors.streams
        self.stage_layers = torch.nn.ModuleDict({str(i): layer for i, layer in layers.items()})
        self.experiment, self.tensors = experiment, tensors
        self.rotary, self.of_layers = rotary, None
        self.runs = stage_runs(experiment.model.layers, experiment.plan.pp)
        # The kinds of layers whose keys and values the stages send.
        self.sent_kinds = stage_sends(experiment.model, experiment.plan.pp).caches

    def forward(self, hidden_states: Any, *_: Any, **given: Any) -> Any:
        """[B, S, D] -> [B, 1, D], the last stage's output at the last positions."""
        tensors = self.tensors
        with scope(Part.EMBED.value):
            x = self._entered(hidden_states, *self.streams.residual[:2])
        inputs = self._inputs(hidden_states, given)
        with tensors.inside():
            out = self._ticks(x, inputs)
            with scope(Part.LM_HEAD.value):
                out = self._of_last(out, inputs.stage)
        for cache in inputs.slots:
            cache.leave(tensors)
        return tensors.left(out, self.streams.rows)

    def _inputs(self, hidden_states: Any, given: dict[str, Any]) -> Inputs:
        tensors, model, positions = self.tensors, self.experiment.model, given["position_ids"]
        context = self.streams.tokens[1]
        of_kinds: dict[AttentionKind, dict[str, Any]] = {}
        for kind in dict.fromkeys(layer.attention for layer in model.layers):
            angles = given["position_embeddings"]
            if model.family.traits.variant in ROTARY_BY_KIND:
                angles = self.rotary(hidden_states, positions, LAYER_TYPES[kind])
            of_kinds[kind] = {
                "attention_mask": self._entered(mask_of(self.experiment, positions[0], kind)),
                "position_embeddings": self._entered(angles, (), context),
            }
        ranks = torch.arange(self.experiment.plan.pp, device=torch_xla.device())
        as_they_are = {"past_key_values", "use_cache"} & set(given)
        inputs = Inputs(
            caches=given["past_key_values"].layers,
            has_shared_keys="shared_kv_states" in given,
            shared={name: given[name] for name in as_they_are}
            | {"position_ids": self._entered(positions, (), context)},
            of_kinds=of_kinds,
            of_layers=self._entered(self.of_layers, *self.streams.residual[:2]),
            stage=tensors.entered(ranks, (STAGES,)),
        )
        for cache in inputs.slots:
            cache.enter(tensors)
        return inputs

    def _entered(self, x: Any, *spec: tuple[str, ...]) -> Any:
        """Arrays in the manual region, split in their first dimensions as `spec` says."""
        if isinstance(x, tuple):
            return tuple(self._entered(part, *spec) for part in x)
        if x is None:
            return None
        return self.tensors.entered(x, (*spec, *((),) * (x.dim() - len(spec))))

    def _of_last(self, out: Any, stage: Any) -> Any:
        """Share the last stage's [b, 1, D] with all stages; one of its devices has it if a prompt is split."""
        tensors, plan = self.tensors, self.experiment.plan
        is_last, axes = stage == plan.pp - 1, ["pp"]
        is_split, is_prefill = self.streams.is_split, not tensors.is_decode
        for axis, is_cut in (("cp", plan.cp > 1), ("tp", is_split)):
            if is_prefill and is_cut:
                is_last = is_last & (tensors.rank(axis) == getattr(plan, axis) - 1)
                axes.append(axis)
        if is_split and not is_prefill:
            out = all_gather(out, 0, tensors.groups("tp"))
        return all_reduce(torch.where(is_last, out, torch.zeros_like(out)), tensors.groups(*axes))

    def _ticks(self, x: Any, inputs: Inputs) -> Any:
        """[b, S, D] -> [b, 1, D], valid on the last stage."""
        n_stages, n_parts = (
            self.experiment.plan.pp,
            self.experiment.n_microbatches(self.tensors.phase),
        )
        parts = x.reshape(n_parts, -1, *x.shape[1:])
        ticks = n_ticks(n_parts, n_stages)
        n_sequences, n_positions = (
            inputs.n_sequences // n_parts,
            inputs.shared["position_ids"].shape[1],
        )
        coming = {RESIDUAL: torch.zeros_like(parts[0])}
        for kind in self.sent_kinds:
            for name, held in self._source(kind, inputs).local.items():
                shape = (n_sequences, held.shape[1], n_positions, held.shape[3])
                zeros = torch.zeros(shape, dtype=held.dtype, device=torch_xla.device())
                coming[f"{kind.name}.{name}"] = zeros
        lasts = list[Any]()
        for tick in range(ticks):
            is_first = inputs.stage == 0
            x = torch.where(is_first, parts[min(tick, n_parts - 1)], coming[RESIDUAL])
            values = self._tick(coming | {RESIDUAL: x}, tick, n_parts, inputs)
            if tick >= n_stages - 1:
                lasts.append(values[RESIDUAL][:, -1:])
            if tick < ticks - 1:
                sent = [self._send_to_next_stage(y) for y in values.values()]
                sent = of_all(sent) if len(sent) > 1 else sent
                coming = dict(zip(values, sent, strict=True))
        return torch.cat(lasts)

    def _source(self, kind: Layer, inputs: Inputs) -> StageLayer:
        """The cache of the last layer of a kind, which later layers share."""
        layers = self.experiment.model.layers
        return inputs.caches[len(layers) - 1 - layers[::-1].index(kind)]

    def _tick(self, values: Values, tick: int, n_parts: int, inputs: Inputs) -> Values:
        """The layers of the stages that have a micro-batch in this tick, whose residual stream is [m, S, D]."""
        n_stages, stage, caches = self.experiment.plan.pp, inputs.stage, inputs.slots
        busy = range(max(0, tick - n_parts + 1), min(n_stages - 1, tick) + 1)
        # The rows of the stage's micro-batch among the device's rows.
        part, n_each = (tick - stage).clamp(0, n_parts - 1), inputs.n_sequences // n_parts
        before = [dict(cache.local) for cache in caches]
        number = torch.zeros_like(stage)
        # Outside a conditional, XLA gives activations a layout in which it has no reduce-scatter, and sends twice
        # the bytes in an all-reduce: every tick has the branch of idle stages, as in the JAX program.
        branches = [_results(values, caches)]
        for run in self.runs:
            stages = range(max(run.stages[0], busy[0]), min(run.stages[-1], busy[-1]) + 1)
            if not stages:
                continue
            is_here = (stage >= stages[0]) & (stage <= stages[-1])
            number = torch.where(is_here, len(branches), number)
            rows = part * n_each + torch.arange(n_each, device=torch_xla.device())
            after = self._branch(run, stages, values, rows, inputs)
            branches.append(_results(after, caches))
            for cache, held in zip(caches, before, strict=True):
                cache.local = dict(held)
        results = list(chosen(number, *branches))
        values = {name: results.pop(0) for name in values}
        for cache in caches:
            cache.local = {name: results.pop(0) for name in cache.local}
        return values

    def _branch(
        self, run: StageRun, stages: range, values: Values, rows: Any, inputs: Inputs
    ) -> Values:
        """The layers of some stages of a run, for the sequences `rows` [m] of a micro-batch."""
        n_layers, x = len(run.kinds), values[RESIDUAL]
        first = run.first_layer + n_layers * (stages[0] - run.stages[0])
        shared: dict[str, tuple[Any, Any]] = {}  # keys and values by kind of attention
        with scope(stages_scope(stages, n_layers=n_layers)):
            of_layers = inputs.of_layers  # [m, S, layers, width] of this stage
            if of_layers is not None:
                start = run.first_layer + (inputs.stage - run.stages[0]) * n_layers
                numbers = start + torch.arange(n_layers, device=torch_xla.device())
                of_layers = of_layers.index_select(0, rows).index_select(2, numbers)
            for kind in caches_before(self.experiment.model, run.first_layer):
                cache = self._source(kind, inputs)
                cache.rows = rows
                received = (values[f"{kind.name}.{name}"] for name in ARRAYS)
                shared[LAYER_TYPES[kind.attention]] = cache.update(*received)
            for number, kind in enumerate(run.kinds):
                index = run.first_layer + number
                given = inputs.of_kinds[kind.attention] | inputs.shared
                if inputs.has_shared_keys:
                    given["shared_kv_states"] = shared
                if of_layers is not None:
                    given["per_layer_input"] = of_layers[:, :, number]
                with scope(f"layer{first + number}"):
                    if not kind.shares_cache:
                        inputs.caches[index].rows = rows
                    x = self.stage_layers[str(index)](x, **given)
                    if not kind.shares_cache:
                        shared[LAYER_TYPES[kind.attention]] = inputs.caches[index].seen
            return self._sent(values | {RESIDUAL: x}, run, inputs)

    def _sent(self, values: Values, run: StageRun, inputs: Inputs) -> Values:
        """The values for the next stage, with the keys and values of layers of this one that later ones share."""
        for kind in self.sent_kinds:
            slot = shared_slot(self.experiment.model, kind, self.experiment.plan.pp)
            if run.kinds.count(kind) > slot:
                cache = self._source(kind, inputs)
                for name, new in zip(ARRAYS, cache.new, strict=True):
                    values[f"{kind.name}.{name}"] = new.to(cache.local[name].dtype)
        return values

    def _send_to_next_stage(self, x: Any) -> Any:
        stages = range(self.experiment.plan.pp - 1)
        pairs = tuple(pair for group in self.tensors.groups("pp") for pair in pairwise(group))
        with scope(stages_scope(stages)), scope(Part.STAGE.value):
            return permuted(x, pairs)


def _results(values: Values, caches: Sequence[StageLayer]) -> list[Any]:
    """What a branch returns: what stages send, and the arrays of all caches."""
    return [*values.values(), *(array for cache in caches for array in cache.local.values())]


def _traced_layers(experiment: Experiment) -> list[int]:
    """The layers of the first stage of each run."""
    runs = stage_runs(experiment.model.layers, experiment.plan.pp)
    return [run.first_layer + number for run in runs for number in range(len(run.kinds))]


def drop_layers(model: Any, experiment: Experiment) -> None:
    """Drop the layers that no stage traces; the others keep their names."""
    for index in {*range(experiment.model.n_layers)} - {*_traced_layers(experiment)}:
        model.model.layers[index] = torch.nn.Identity()


def add_pipeline(model: Any, tensors: Tensors) -> None:
    """Replace the layers by the pipeline, which keeps the layers of each run's first stage."""
    decoder, experiment = model.model, tensors.experiment
    layers = {index: decoder.layers[index] for index in _traced_layers(experiment)}
    # sp splits the prompt, or the batch.
    dim = int(not tensors.is_decode) if tensors.streams.is_split else None
    for index, layer in layers.items():
        with_local_heads(attention_of(layer), experiment.plan)
        if experiment.plan.tp > 1:
            mlp = experiment.model.layers[index].mlp
            is_exchanged = "tp" in exchange_axes(experiment.plan) and mlp is not MlpKind.DENSE
            _add_collectives(layer, mlp, tensors, dim, is_exchanged=is_exchanged)
    for module, name, whole, is_of_experts in tensors.shares:
        # All-gathers of weights that fsdp splits, in the scope of their module when it is called; experts have none.
        part = Part.MOE_EXPERTS if is_of_experts else None
        module.register_forward_pre_hook(partial(_gather, name=name, whole=whole, part=part))
    pipeline = StagedModel(layers, tensors, decoder.rotary_emb)
    if experiment.model.layer_inputs is not None:
        project = decoder.project_per_layer_inputs

        def kept(*given: Any) -> Any:  # transformers passes each layer its own embeddings
            pipeline.of_layers = project(*given)
            return pipeline.of_layers

        decoder.project_per_layer_inputs = kept
    decoder.layers = torch.nn.ModuleList([pipeline])


def _add_collectives(
    layer: Any, mlp: MlpKind, tensors: Tensors, dim: int | None, *, is_exchanged: bool
) -> None:
    """Sum the outputs of a layer's blocks over tp; sp splits `dim` of them, and gathers their inputs.

    A mixture whose rows `is_exchanged` over tp takes and returns tokens of one device; its shared experts do not.
    """
    groups = tensors.groups("tp")

    def gathered(x: Any) -> Any:
        return x if dim is None else all_gather(x, dim, groups)

    def summed(x: Any) -> Any:
        return all_reduce(x, groups) if dim is None else reduce_scatter(x, dim, groups)

    of_attention, of_mlp = norms_before_blocks(layer)
    blocks: list[tuple[Any, Any, Part | None, Part | None]] = [
        (of_attention, attention_of(layer), None, None)
    ]
    if mlp is MlpKind.DENSE_AND_MOE:
        blocks.append((of_mlp, layer.mlp, None, None))
        # Before the hook that opens the norm's scope.
        whole = share_stream(layer, (lambda x: x) if is_exchanged else gathered, is_first=True)
        if not is_exchanged:

            def of_experts(x: Any) -> Any:
                return summed(x.reshape(whole[0].shape)).flatten(0, 1)

            on_output(layer.experts, of_experts, Part.MOE_COMBINE, is_first=True)
    elif is_exchanged:
        _add_to_shared_experts(feed_forward(layer), gathered, summed)
    elif mlp is MlpKind.DENSE:
        blocks.append((of_mlp, feed_forward(layer), None, None))
    else:
        blocks.append((of_mlp, feed_forward(layer), Part.MOE_DISPATCH, Part.MOE_COMBINE))
    for norm, block, before, behind in blocks:
        on_output(norm, gathered, before, is_first=True)
        on_output(block, summed, behind, is_first=True)


def _add_to_shared_experts(
    mixture: Any, gathered: Callable[[Any], Any], summed: Callable[[Any], Any]
) -> None:
    """Gather the inputs of the shared experts of a mixture, if it has any, and sum their outputs."""

    def before(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        with scope(Part.MOE_SHARED.value):
            return (gathered(inputs[0]), *inputs[1:])

    for expert in (getattr(mixture, name) for name in SHARED_EXPERTS if hasattr(mixture, name)):
        expert.register_forward_pre_hook(before)
        on_output(expert, summed, Part.MOE_SHARED, is_first=True)


def _gather(
    module: Any, _inputs: Any, *, name: str, whole: Callable[[], Any], part: Part | None
) -> None:
    with nullcontext() if part is None else scope(part.value):
        module.__dict__[name] = whole()
