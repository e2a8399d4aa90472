"""Collectives of meshscope's own decoder under its manual partitioner.

Dimensions: b sequences per device, s tokens per step, D hidden, V padded vocabulary.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from msgspec import structs

from meshscope.cost.planned import (
    ALWAYS_REDUCED,
    NEVER_REDUCED,
    REDUCED_FOR_ONE,
    PlannedCollective,
    PlannedStage,
    ReducedFor,
    pipeline_stages,
)
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part, Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.model.arrays import Dim, Weight, gathered_weights
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms.attention import AttentionStep
from meshscope.model.mechanisms.ngrams import ENGRAM
from meshscope.plans import weights as stored
from meshscope.plans.caches import ContextForm, cache_slots, local_tokens, ring_pairs, ring_sends
from meshscope.plans.dispatch import DispatchForm, exchange_axes, gathered_ranks, routed_tokens
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Tables
from meshscope.units import DTYPE_BITS

# Weights that transformers stores in one array with the preceding weight: ups of experts with gates, and values
# of latents with keys.
JOINED = {"experts_w_up", "w_uv"}


def attention_step(
    experiment: Experiment, phase: Phase, *, is_cut: bool, n_ring_sends: int | None = None
) -> AttentionStep:
    """The sizes of a step on one device: a micro-batch, a chunk or a decode step."""
    plan, workload, is_prefill = experiment.plan, experiment.workload, phase is Phase.PREFILL
    n_positions, n_slots = (
        experiment.n_positions(phase),
        cache_slots(plan, workload, experiment.model),
    )
    n_local = local_tokens(plan, phase, n_positions)
    n_prompt_keys = n_local if plan.cp > 1 else workload.prompt
    return AttentionStep(
        is_prefill=is_prefill,
        is_cut=is_cut,
        tp=plan.tp,
        cp=plan.cp,
        n_sequences=experiment.n_sequences(phase) // experiment.n_microbatches(phase),
        n_prompt=workload.prompt,
        n_positions=n_positions,
        n_local=n_local,
        n_keys=n_prompt_keys if is_prefill else n_slots,
        n_slots=n_slots,
        act_bytes=DTYPE_BITS[workload.activation_dtype] / 8,
        n_ring_sends=n_ring_sends,
    )


def meshscope_stages(
    experiment: Experiment, phase: Phase, *, is_cut: bool, chosen: Collection[int] | None = None
) -> tuple[PlannedStage, ...]:
    """The collectives of one step of meshscope's program, per pipeline stage; all layers, or the chosen ones."""
    pp, n_microbatches = experiment.plan.pp, experiment.n_microbatches(phase)
    program, whole = (
        _DecoderStep(experiment, phase, is_cut=is_cut, n_microbatches=n)
        for n in (n_microbatches, 1)
    )
    layers, tables = program.model.layers, program.model.tables
    listed = range(len(layers)) if chosen is None else chosen

    def step_of(layer: Layer) -> _DecoderStep:
        """The step of all tokens, or of the last ones of prompts if only they pass through a layer."""
        n_prompt = experiment.workload.prompt
        n = program.model.attention_of(layer).n_replayed(layer.attention, n_prompt)
        return program if n is None else ends(n, n_microbatches)

    def ends(n: int, n_microbatches: int) -> _DecoderStep:
        """The step with the last `n` tokens of prompts."""
        if phase is Phase.DECODE:
            return whole if n_microbatches == 1 else program
        is_short = n < experiment.n_positions(phase)  # all devices of cp have the last tokens
        n_prompt = n * experiment.plan.cp if is_short else experiment.workload.prompt
        chunk, n_each = experiment.workload.prefill_chunk, experiment.prefill_chunks.n_sequences
        sizes = {"prompt": n_prompt, "prefill_chunk": None if chunk is None else n_each * n_prompt}
        replay = replace(experiment, workload=replace(experiment.workload, **sizes))
        step = _DecoderStep(replay, phase, is_cut=is_cut, n_microbatches=n_microbatches)
        step.is_end, step.is_whole = True, is_short
        return step

    n_end = program.model.n_replayed
    by_kind: dict[Layer, tuple[PlannedCollective, ...]] = {}
    # Layers with equal collectives share a tuple.
    for layer in dict.fromkeys(layers[index] for index in listed):
        planned = tuple(step_of(layer).layer(layer))
        n_new = experiment.n_positions(phase)
        is_entry = layer.attention is AttentionKind.DECODER_FULL and phase is Phase.PREFILL
        if is_entry and n_end is not None and n_end < n_new:
            entries = program.over_cp(layer) if experiment.plan.cp > 1 else ()
            end = ends(n_end, n_microbatches).ends()
            planned = (*program.gathered(Part.ATTN), *entries, *end, *planned)
        by_kind[layer] = next((one for one in by_kind.values() if one == planned), planned)
    stage = PlannedStage(
        before=(*program.embed(), *(program.table_rows() if pp == 1 else ())),
        layers=tuple(
            (
                index,
                (*program.rows_taken_in(index), *by_kind[layers[index]])
                if index in tables
                else by_kind[layers[index]],
            )
            for index in listed
        ),
        after=tuple((whole if n_end is None else ends(n_end, 1)).logits()),
    )
    if pp == 1:
        return (stage,)
    of_ends = None
    if program.is_torchxla:
        of_ends = PlannedStage(before=tuple(whole.embed()), layers=(), after=stage.after)
    residual = program.split_residual
    shared = tuple(whole.table_rows())
    return pipeline_stages(
        experiment, phase, whole=stage, residual=residual, ends=of_ends, shared=shared
    )


class _DecoderStep:
    """One chunk or decode step of the decoder on one device, for one of `n_microbatches` micro-batches.

    `residual` [b,s,D] is the residual stream of the device's sequences, split over cp only; a decoded token is a
    sequence. Between blocks it `is_split` over tp (sp): prefill splits the sequence, decode the batch, if tp divides
    it, and otherwise uses plain tensor parallelism. `facts` are None for chips other than TPUs.
    """

    def __init__(
        self, experiment: Experiment, phase: Phase, *, is_cut: bool, n_microbatches: int
    ) -> None:
        self.experiment, self.phase, self.is_cut = experiment, phase, is_cut
        self.model, self.plan = experiment.model, experiment.plan
        self.workload = experiment.workload
        self.n_times = n_microbatches * experiment.n_chunks(phase)  # in a step
        self.is_prefill, self.is_end, self.is_whole = phase is Phase.PREFILL, False, False
        self.is_torchxla = experiment.program.frontend.is_traced
        self.is_annotated = self.is_torchxla and not experiment.has_explicit_layers
        n_positions = experiment.n_positions(phase) if self.is_prefill else 1
        n_sequences = experiment.n_rows(phase) // n_microbatches
        n_tokens = local_tokens(self.plan, phase, n_positions)
        self.residual = (n_sequences, n_tokens, self.model.hidden)
        self.is_split = self.plan.sp and (self.is_prefill or n_sequences % self.plan.tp == 0)
        chip = experiment.topology.chip
        self.facts = compiler_facts(chip.name) if chip.kind is ChipKind.TPU else None
        self.places: dict[tuple[str, ...], tuple[str, Groups]] = {}  # by axes

    @property
    def split_residual(self) -> tuple[int, ...]:
        """One device's shard of the residual stream between blocks, including parallel streams."""
        batch, n_tokens, hidden = self.residual
        hyper, n_parts = self.model.hyper, self.plan.tp if self.is_split else 1
        width = (hidden,) if hyper is None else (hyper.n_streams, hidden)
        if self.is_prefill:
            return (batch, n_tokens // n_parts, *width)
        return (batch // n_parts, n_tokens, *width)

    def collective(
        self, part: Part, kind: Kind, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str = ""
    ) -> PlannedCollective:
        """A collective over plan axes; `dtype` defaults to the activation dtype."""
        if axes not in self.places:
            mesh = self.plan.mesh
            names = "+".join(name for name in mesh.names if name in axes)
            self.places[axes] = (names, mesh.groups(*axes))
        axis, groups = self.places[axes]
        return PlannedCollective(
            part=part,
            kind=kind,
            axis=axis,
            groups=groups,
            shape=shape,
            dtype=dtype or self.workload.activation_dtype,
            count=self.n_times,
            n_sequences=self.residual[0],
            is_of_end=self.is_end,
        )

    def over_tp(
        self, part: Part, kind: Kind, shape: tuple[int, ...]
    ) -> Iterator[PlannedCollective]:
        """A collective of activations over tp; none if tp=1."""
        if self.plan.tp > 1:
            yield self.collective(part, kind, ("tp",), shape)

    def embed(self) -> Iterator[PlannedCollective]:
        """Vocabulary-parallel embedding: each tp device looks up its shard and the results are summed."""
        weights = {weight.name: weight for weight in stored.outer_weights(self.model, self.plan)}
        of_layers = [
            weights[name] for name in ("layer_embed", "layer_embed_proj") if name in weights
        ]
        tables = (weights["embed"], *stored.draft_head_weights(self.model), *of_layers)
        yield from self.gather_weights(Part.EMBED, *tables)
        yield from self.summed(Part.EMBED)
        if of_layers:
            yield from self.summed(Part.EMBED, (*self.residual[:2], of_layers[0].shape[1]))

    def table_rows(self) -> Iterator[PlannedCollective]:
        """Lookups in tables whose rows are split over the axes of `tables`.

        Under cp, a prompt's ids [b,s] are gathered: n-grams begin in the block before. The hashes [b,s,tables,rows] of tokens
        that data splits reach each of its devices, which looks up the rows that it has. For each table, sums [b,s,rows x
        width] over data and cp leave each device the rows of its tokens, and one over tp and pp.
        """
        plan, (batch, n_tokens, _) = self.plan, self.residual
        engram, tables = self.model.engram, self.model.tables
        is_split, axes, part = plan.cp > 1 and self.is_prefill, plan.table_axes, Part.EMBED
        if engram is None or plan.tables is Tables.HOST:
            return
        if is_split:
            ids = (batch, n_tokens * plan.cp)
            yield self.collective(part, Kind.ALL_GATHER, ("cp",), ids, "s32")
        if not tables:
            return
        has_cp = "cp" in axes and plan.cp > 1
        shape = (batch, n_tokens * (plan.cp if has_cp and is_split else 1))
        width, sums = engram.n_read * engram.head_dim, list[PlannedCollective]()
        if plan.data_axis in axes and plan.data_size > 1:
            shape, axis = (batch * plan.data_size, shape[1]), (plan.data_axis,)
            hashes = (*shape, len(tables), engram.n_read)
            yield self.collective(part, Kind.ALL_GATHER, axis, hashes, "s32")
            table = next(w for w in stored.outer_weights(self.model, plan) if Dim.TABLE in w.dims)
            is_scaled = table.scale(self.workload.weight_dtype) is not None
            # The compiler scatters scaled rows of single tokens before it joins those of a token.
            is_cut = is_scaled and not self.is_prefill and shape[1] == 1
            sizes = (shape[0] * engram.n_read, engram.head_dim) if is_cut else (*shape, width)
            scatter = self.collective(part, Kind.REDUCE_SCATTER, axis, sizes)
            sums.append(structs.replace(scatter, reduced_for=self._reduced_rows(plan.data_size)))
        if has_cp and is_split:
            rows = (batch, shape[1], width)
            scatter = self.collective(part, Kind.REDUCE_SCATTER, ("cp",), rows)
            rule = self._reduced_sums(part, plan.cp, shape[1])
            sums.append(structs.replace(scatter, reduced_for=rule))
        if "tp" in axes:
            sums += self.summed(part, (batch, n_tokens, width))
        alike = {"cp": has_cp and not is_split, "pp": "pp" in axes and plan.pp > 1}
        if among := tuple(axis for axis, is_alike in alike.items() if is_alike):
            rows = (*self.split_residual[:2], width)
            sums.append(self.collective(part, Kind.ALL_REDUCE, among, rows))
        for summed in sums:
            yield structs.replace(summed, count=len(tables) * self.n_times)

    def rows_taken_in(self, layer: int) -> Iterator[PlannedCollective]:
        """The gathers of what takes in the rows of the table before this layer."""
        every = stored.outer_weights(self.model, self.plan)
        taken = (w for w in every if w.name.startswith(f"{ENGRAM}{layer}_"))
        yield from self.gather_weights(Part.ATTN, *taken)
        hyper, is_convolved = self.model.hyper, self.model.layers[layer].attention.is_linear
        if self.is_split and is_convolved and hyper is not None:  # gates and values of neighbors
            shape = (*self.residual[:2], hyper.n_streams + self.model.hidden)
            yield from self.over_tp(Part.ATTN, Kind.ALL_GATHER, shape)

    def ends(self) -> Iterator[PlannedCollective]:
        """Sums that give each device its streams, and their weights, of the last tokens of prompts that tp or cp splits."""
        hyper = self.model.hyper
        assert hyper is not None
        tokens, shape = self.residual[:2], (*self.residual[:2], hyper.n_streams)
        if self.is_split:
            yield from self.summed(Part.ATTN, (*tokens, hyper.n_streams * self.model.hidden))
            for summed in self.summed(Part.ATTN, shape):
                one = structs.replace(summed, dtype="f32")
                is_reduced = self.facts is not None and self.facts.scattered_rows is None
                yield structs.replace(one, reduced_for=ALWAYS_REDUCED) if is_reduced else one
        if self.plan.cp > 1:
            shape = self.split_residual
            yield self.collective(Part.ATTN, Kind.ALL_REDUCE, ("cp",), shape)
            yield self.collective(Part.ATTN, Kind.ALL_REDUCE, ("cp",), shape[:-1], "f32")

    def layer(self, layer: Layer) -> Iterator[PlannedCollective]:
        model = self.model
        if layer.has_attention:
            yield from self.attention(layer)
        if layer.has_mlp:
            yield from self.block(Part.MLP, stored.dense_weights(model, layer))
        if layer.has_experts:
            yield from self.mixture(layer)
        yield from self.gather_weights(Part.MLP, *stored.layer_input_weights(model))

    def attention(self, layer: Layer) -> Iterator[PlannedCollective]:
        """The attention of a layer: takes the whole residual stream, returns a partial sum over tp."""
        model = self.model
        unused = model.attention.unused_weights(self.workload.prompt) if self.is_prefill else ()
        weights = stored.attention_weights(model, self.plan, layer)
        yield from self.gathered(Part.ATTN)
        yield from self.gather_weights(Part.ATTN, *(w for w in weights if w.name not in unused))
        if not layer.attention.is_linear and (n := model.attention.n_token_sums):
            for summed in self.over_tp(Part.ATTN, Kind.ALL_REDUCE, (*self.residual[:2], n)):
                yield structs.replace(summed, dtype="f32")
        if self.plan.cp > 1 and not self.is_whole:
            yield from self.over_cp(layer)
        if not model.is_parallel:
            yield from self.summed(Part.ATTN)

    def block(self, part: Part, weights: tuple[Weight, ...]) -> Iterator[PlannedCollective]:
        """An MLP: takes the whole residual stream, returns a partial sum over tp; in parallel with attention, both."""
        if not self.model.is_parallel:
            yield from self.gathered(part)
        yield from self.gather_weights(part, *weights)
        yield from self.summed(part)

    def over_cp(self, layer: Layer) -> Iterator[PlannedCollective]:
        """The collectives of attention over cp, in program order; with a kernel, a ring leaves out blocks beyond the window."""
        experiment, kind, cp, n_sends = self.experiment, layer.attention, self.plan.cp, None
        if experiment.context_form is ContextForm.RING:
            has_kernel = experiment.kernels.prefill_attention.kernel is not None
            has_window = has_kernel and kind is not AttentionKind.CHUNKED
            window = self.model.attention.window_of(kind) if has_window else None
            n_local = local_tokens(self.plan, Phase.PREFILL, self.workload.prompt)
            n_sends = ring_sends(cp, n_local, window)
        step = attention_step(experiment, self.phase, is_cut=self.is_cut, n_ring_sends=n_sends)
        groups = self.plan.mesh.groups("cp")
        for exchange in self.model.attention_of(layer).over_cp(kind, step):
            yield PlannedCollective(
                part=Part.ATTN,
                kind=exchange.kind,
                axis="cp",
                groups=ring_pairs(groups) if exchange.kind is Kind.PERMUTE else groups,
                shape=exchange.shape,
                dtype=exchange.dtype or self.workload.activation_dtype,
                count=exchange.count * self.n_times,
            )

    def mixture(self, layer: Layer) -> Iterator[PlannedCollective]:
        """A mixture of experts, with its exchange of rows [ranks, slots, D], or [rows, D] if it is ragged.

        If the dispatch includes the tp axis, each device routes its own tokens and the shared experts
        are a separate block. Otherwise all tp devices route the same tokens, and one reduction covers
        routed and shared experts. TorchXLA programs need no counts of rows. The traffic of a ragged exchange depends on
        the routing: averaged over devices it is at most the smaller of the array of rows and the receive buffer.
        """
        plan, form, moe = self.plan, self.experiment.dispatch_form, self.model.moe
        assert moe is not None
        width = moe.row_width(self.model.hidden)
        dispatch = self.experiment.dispatch(self.phase)
        shared = stored.shared_weights(self.model, layer)
        routes_alike = "tp" not in exchange_axes(plan, form)
        if routes_alike:
            yield from self.gathered(Part.MOE_DISPATCH)
        latent = stored.latent_weights(self.model)
        yield from self.gather_weights(Part.MOE_ROUTER, *latent[:1])
        if (n_ranks := gathered_ranks(plan, form)) > 1:
            yield from self.all_tokens(n_ranks)
            yield from self.summed(Part.MOE_SHARED) if shared else ()
            return
        rows = None
        if dispatch is not None:
            n, axes, n_slots = dispatch.n_ranks, dispatch.axes, dispatch.n_slots
            n_rows = min(dispatch.n_rows, dispatch.n_buffer_rows)
            shape = (n_rows, width) if n_slots is None else (n, n_slots, width)
            rows = self.collective(Part.MOE_DISPATCH, Kind.ALL_TO_ALL, axes, shape)
            if dispatch.form is DispatchForm.RAGGED and self.facts is not None:
                multiple = self.facts.ragged_row_multiple * 8 // DTYPE_BITS[rows.dtype]
                padded = -(-width // multiple) * multiple
                rows = structs.replace(rows, carried=(n_rows, padded))
            if not self.is_torchxla:
                counts = (n, n * dispatch.n_local_experts)
                gather = self.collective(Part.MOE_DISPATCH, Kind.ALL_GATHER, axes, counts, "s32")
                yield self.reduced_row(gather, counts[-1], reduced_for=ALWAYS_REDUCED)
            yield rows
        yield from self.gather_weights(Part.MOE_EXPERTS, *stored.expert_weights(self.model, layer))
        if rows is not None:
            yield structs.replace(rows, part=Part.MOE_COMBINE)
        yield from self.gather_weights(Part.MOE_COMBINE, *latent[1:])
        if routes_alike:
            yield from self.gather_weights(Part.MOE_SHARED, *shared)
            yield from self.summed(Part.MOE_COMBINE)
            return
        if not self.is_split:
            n_padded = routed_tokens(plan, self.residual[0] * self.residual[1], form) * plan.tp
            yield from self.over_tp(Part.MOE_COMBINE, Kind.ALL_GATHER, (n_padded, width))
        if shared:
            yield from self.block(Part.MOE_SHARED, shared)

    def all_tokens(self, n_ranks: int) -> Iterator[PlannedCollective]:
        """The tokens of all data-parallel ranks with the experts that they choose, and their sums.

        Source: fused_moe_func and all_gather_topk_indices_and_weights in tpu-inference 0.27,
        layers/common/fused_moe_gmm.py: indices and weights go in one array of 32 bits.
        """
        moe, axes = self.model.moe, (self.plan.data_axis,)
        assert moe is not None
        n_tokens = n_ranks * self.residual[0] * self.residual[1]
        shape, choices = (n_tokens, self.model.hidden), (2, n_tokens * moe.n_active)
        yield self.collective(Part.MOE_DISPATCH, Kind.ALL_GATHER, axes, choices, "s32")
        yield self.collective(Part.MOE_DISPATCH, Kind.ALL_GATHER, axes, shape)
        yield from self.over_tp(Part.MOE_COMBINE, Kind.ALL_REDUCE, shape)
        yield self.collective(Part.MOE_COMBINE, Kind.REDUCE_SCATTER, axes, shape)

    def logits(self) -> Iterator[PlannedCollective]:
        """Brings the last token to all tp devices, then all-gathers the logits [b,V].

        A head tied to the embedding is gathered with it once, but in a pipeline the last stage gathers it again.
        """
        model, plan, part = self.model, self.plan, Part.LM_HEAD
        vocab = stored.padded_vocab(model, plan)
        yield from self.last_token()
        if not model.has_tied_embeddings or plan.pp > 1 or self.is_torchxla:
            yield from self.gather_weights(part, stored.head_weight(model, plan))
        for gather in self.over_tp(part, Kind.ALL_GATHER, (self.residual[0], vocab)):
            yield self.reduced_row(gather, vocab // plan.tp, reduced_for=REDUCED_FOR_ONE)

    def last_token(self) -> Iterator[PlannedCollective]:
        """The last token of each sequence, on all devices of tp and cp.

        In prefill one device holds it and an all-reduce adds zeros from the others. In decode the
        batch is split over tp under sp, and is all-gathered. In TorchXLA programs, the last stage of a pipeline
        brings it to all of them; if their layers are annotated, the partitioner takes it from a split prompt with a
        permute that the all-reduce then repeats.
        """
        (batch, _, hidden), is_prefill, part = self.residual, self.is_prefill, Part.LM_HEAD
        meets = {
            "pp": self.is_torchxla and self.plan.pp > 1,
            "cp": is_prefill and self.plan.cp > 1 and not self.is_whole,
            "tp": is_prefill and self.is_split,
        }
        axes = tuple(axis for axis, is_met in meets.items() if is_met)
        if self.is_split and not is_prefill:
            yield from self.over_tp(part, Kind.ALL_GATHER, self.residual)
        if self.is_annotated and is_prefill and axes == ("tp",):
            sliced = self.collective(part, Kind.PERMUTE, axes, (batch, 1, hidden))
            yield structs.replace(
                sliced, groups=tuple((group[-1], group[0]) for group in sliced.groups)
            )
        if axes:
            yield self.collective(part, Kind.ALL_REDUCE, axes, (batch, hidden))

    def gathered(self, part: Part) -> Iterator[PlannedCollective]:
        """All-gather of the residual stream over tp, if it is split."""
        if self.is_split:
            yield from self.over_tp(part, Kind.ALL_GATHER, self.residual)

    def summed(
        self, part: Part, shape: tuple[int, ...] | None = None
    ) -> Iterator[PlannedCollective]:
        """Sum of a block's partial outputs, or of this shape, over tp: all-reduce, or reduce-scatter under sp."""
        shape = shape or self.residual
        if not self.is_split:
            yield from self.over_tp(part, Kind.ALL_REDUCE, shape)
            return
        rule = self._reduced_sums(part, self.plan.tp, self.residual[1])
        for scatter in self.over_tp(part, Kind.REDUCE_SCATTER, shape):
            yield structs.replace(scatter, reduced_for=rule)

    def _reduced_rows(self, n_devices: int) -> ReducedFor:
        """When the compiler turns a reduce-scatter of sequences over data into an all-reduce, as in `_reduced_sums`."""
        if self.facts is None:
            return NEVER_REDUCED
        if self._is_never_scattered(n_devices):
            return ALWAYS_REDUCED
        if self.residual[1] > 1:
            return NEVER_REDUCED
        scattered = self.facts.scattered_rows
        return (
            ALWAYS_REDUCED
            if scattered is None
            else ReducedFor(n_sequences=0, multiple=scattered[0])
        )

    def _is_never_scattered(self, n_devices: int) -> bool:
        """Whether a group of so many devices is a whole slice over which the compiler uses no reduce-scatters."""
        topology = self.experiment.topology
        grid = tuple(sorted(topology.grid))
        grids = () if self.facts is None else self.facts.grids_without_scatters
        return n_devices == topology.n_devices and grid in grids

    def _reduced_sums(self, part: Part, n_devices: int, n_positions: int) -> ReducedFor:
        """When the compiler turns a reduce-scatter of positions into an all-reduce: over a whole slice, or of rows only.

        A sum has rows only (a matrix) in decode and in the prefill of a single sequence, which annotated programs
        scatter.
        """
        facts = self.facts
        if facts is None:
            # XLA inserts the sums of annotated layers on CPU devices without reduce-scatters.
            is_inserted = self.is_annotated and part is not Part.EMBED
            return ALWAYS_REDUCED if is_inserted else NEVER_REDUCED
        has_rows, scattered = n_positions == 1, facts.scattered_rows
        if self._is_never_scattered(n_devices):
            return ALWAYS_REDUCED
        if self.is_annotated and not has_rows:
            return NEVER_REDUCED
        if scattered is None:
            return ALWAYS_REDUCED if has_rows else REDUCED_FOR_ONE
        multiple, most_bytes = scattered
        if has_rows:
            return ReducedFor(n_sequences=0, multiple=multiple * n_devices)
        has_tiles = n_positions % (multiple * n_devices) == 0  # of each device's positions
        return ReducedFor(n_sequences=1, over_bytes=most_bytes * n_devices if has_tiles else 0)

    def reduced_row(
        self, gather: PlannedCollective, n_local: int, *, reduced_for: ReducedFor
    ) -> PlannedCollective:
        """The gather of `n_local` elements of each device; for a single row, maybe by an all-reduce."""
        if self.facts is None:
            return gather
        multiple, most_devices = self.facts.gathered_rows
        if n_local % multiple == 0 and len(gather.groups[0]) <= most_devices:
            return gather
        return structs.replace(gather, reduced_for=reduced_for)

    def gather_weights(self, part: Part, *weights: Weight) -> Iterator[PlannedCollective]:
        """One all-gather per weight that fsdp splits; none if fsdp=1."""
        plan = self.plan
        if plan.fsdp == 1:
            return
        arrays = gathered_weights(weights, plan)
        if self.is_torchxla:
            joined: list[tuple[Weight, tuple[int, ...]]] = []
            for weight, shape in arrays:
                width = joined.pop()[1][-1] if weight.name in JOINED else 0
                joined.append((weight, (*shape[:-1], shape[-1] + width)))
            arrays = tuple(joined)
        for weight, shape in arrays:
            gather = self.collective(part, Kind.ALL_GATHER, ("fsdp",), shape)
            yield structs.replace(gather, weight=weight).with_weights_of(self.workload)
