"""Collectives of meshscope's own decoder under its manual partitioner.

Dimensions: b sequences per device, s tokens per step, D hidden, V padded vocabulary.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part, Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import CompilerFacts, compiler_facts
from meshscope.model.arrays import Weight, gathered_arrays
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms.attention import AttentionStep
from meshscope.model.model import Model
from meshscope.plans.caches import (
    ContextForm,
    cache_slots,
    local_tokens,
    ring_pairs,
    ring_sends,
)
from meshscope.plans.dispatch import Dispatch, exchange_axes, routed_tokens
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.stages import readers_of_received
from meshscope.plans.weights import (
    attention_weights,
    dense_weights,
    draft_head_weights,
    expert_weights,
    head_weight,
    layer_input_weights,
    outer_weights,
    padded_vocab,
    shared_weights,
)
from meshscope.plans.workload import Workload
from meshscope.prediction.pipeline import pipeline_stages, sent_arrays
from meshscope.prediction.planned_collective import (
    ALWAYS_REDUCED,
    REDUCED_FOR_ONE,
    PlannedCollective,
    PlannedStage,
    PlannedStep,
    ReducedFor,
    repeated,
)
from meshscope.units import DTYPE_BITS


def attention_step(
    experiment: Experiment, phase: Phase, *, is_cut: bool, n_ring_sends: int | None = None
) -> AttentionStep:
    """The sizes of a step on one device: those of a micro-batch, a chunk or a decode step."""
    plan, workload, is_prefill = experiment.plan, experiment.workload, phase is Phase.PREFILL
    n_positions = experiment.n_positions(phase)
    n_local, n_slots = local_tokens(plan, phase, n_positions), cache_slots(plan, workload)
    n_keys = n_slots
    if is_prefill:
        n_keys = n_local if plan.cp > 1 else workload.prompt
    return AttentionStep(
        is_prefill=is_prefill,
        is_cut=is_cut,
        tp=plan.tp,
        cp=plan.cp,
        n_sequences=experiment.n_sequences(phase) // experiment.n_microbatches(phase),
        n_prompt=workload.prompt,
        n_positions=n_positions,
        n_local=n_local,
        n_keys=n_keys,
        n_slots=n_slots,
        act_bytes=DTYPE_BITS[workload.activation_dtype] / 8,
        n_ring_sends=n_ring_sends,
    )


def context_collectives(
    experiment: Experiment, step: PlannedStep, layer: Layer, *, reads_received: bool = False
) -> tuple[PlannedCollective, ...]:
    """The collectives of one layer over cp, in program order; none if cp=1.

    `reads_received` is whether the layer is the first of its stage that reads keys and values of an earlier stage.
    """
    if experiment.plan.cp == 1:
        return ()
    n_sends = _ring_sends(experiment, layer, reads_received=reads_received)
    split = attention_step(experiment, step.phase, is_cut=step.is_cut, n_ring_sends=n_sends)
    groups = experiment.plan.mesh.groups("cp")
    return tuple(
        PlannedCollective(
            part=Part.ATTN,
            kind=exchange.kind,
            axis="cp",
            groups=ring_pairs(groups) if exchange.kind is Kind.PERMUTE else groups,
            shape=exchange.shape,
            dtype=exchange.dtype or experiment.workload.activation_dtype,
            count=exchange.count,
        )
        for exchange in experiment.model.attention_of(layer).over_cp(layer.attention, split)
    )


def _ring_sends(experiment: Experiment, layer: Layer, *, reads_received: bool) -> int | None:
    """Times that keys move around the ring in a prompt; None if they are gathered.

    With a kernel, the ring leaves out blocks beyond the window. In TorchXLA programs, XLA merges the equal permutes
    of layers of a stage that share a cache; JAX programs send the blocks for each of them.
    """
    if experiment.context_form is not ContextForm.RING:
        return None
    if experiment.program.frontend.is_traced and layer.shares_cache and not reads_received:
        return 0
    has_window = (
        experiment.kernels.prefill_attention.kernel is not None
        and layer.attention is not AttentionKind.CHUNKED
    )
    attention = experiment.model.attention
    window = attention.window_of(layer.attention) if has_window else None
    n_local = local_tokens(experiment.plan, Phase.PREFILL, experiment.workload.prompt)
    return ring_sends(experiment.plan.cp, n_local, window)


# Weights in one array with that before them: ups of experts with gates, and values of latents with keys.
JOINED = {"experts_w_up", "w_uv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecoderStep:
    """One chunk or decode step of the decoder on one device, for one of `n_microbatches` micro-batches."""

    experiment: Experiment
    step: PlannedStep
    n_microbatches: int = 1
    places: dict[tuple[str, ...], tuple[str, Groups]] = field(default_factory=dict)  # by axes

    @property
    def model(self) -> Model:
        return self.experiment.model

    @property
    def plan(self) -> Plan:
        return self.experiment.plan

    @property
    def workload(self) -> Workload:
        return self.experiment.workload

    @property
    def local_batch(self) -> int:
        """Sequences of the residual stream; each token of a decode step is one."""
        return self.experiment.n_rows(self.step.phase) // self.n_microbatches

    @property
    def residual(self) -> tuple[int, int, int]:
        """[b,s,D], the residual stream of this device's sequences, split over cp only."""
        n_tokens = local_tokens(self.plan, self.step.phase, self.step.n_tokens)
        return (self.local_batch, n_tokens, self.model.hidden)

    @property
    def n_local_tokens(self) -> int:
        """Tokens of the residual stream."""
        return self.residual[0] * self.residual[1]

    @property
    def is_split(self) -> bool:
        """Whether the residual stream is split over tp between blocks (sp).

        Prefill splits the sequence. Decode splits the batch, with each token a row of its own, if tp
        divides it, and otherwise uses plain tensor parallelism.
        """
        is_prefill = self.step.phase is Phase.PREFILL
        return self.plan.sp and (is_prefill or self.local_batch % self.plan.tp == 0)

    @property
    def is_torchxla(self) -> bool:
        """Whether the front end is TorchXLA."""
        return self.experiment.program.frontend.is_traced

    @property
    def facts(self) -> CompilerFacts | None:
        """The behavior of the TPU compiler; None for other chips."""
        chip = self.experiment.topology.chip
        return compiler_facts(chip.name) if chip.kind is ChipKind.TPU else None

    def collective(
        self, part: Part, kind: Kind, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str = ""
    ) -> PlannedCollective:
        """A collective over plan axes; `dtype` defaults to that of the activations."""
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
            n_sequences=self.local_batch,
        )


def meshscope_stages(
    experiment: Experiment, step: PlannedStep, *, chosen: Collection[int] | None = None
) -> tuple[PlannedStage, ...]:
    """The collectives of one step of meshscope's program, per pipeline stage; layers of the chosen ones."""
    program = _DecoderStep(
        experiment=experiment,
        step=step,
        n_microbatches=experiment.n_microbatches(step.phase),
    )
    readers = readers_of_received(program.model, program.plan.pp)
    keys = [(layer, index in readers) for index, layer in enumerate(program.model.layers)]
    by_kind = {key: _layer(program, key[0], reads_received=key[1]) for key in dict.fromkeys(keys)}
    stage = PlannedStage(
        before=_embed(program),
        layers=tuple((index, by_kind[key]) for index, key in enumerate(keys)),
        after=_logits(replace(program, n_microbatches=1)),
    )
    n_chunks = experiment.n_chunks(step.phase)
    if n_chunks > 1:
        return (repeated(stage, n_chunks),)
    sent = () if program.plan.pp == 1 else sent_arrays(experiment, step, _split_residual(program))
    ends = None
    if program.plan.pp > 1 and program.is_torchxla:
        whole = replace(program, n_microbatches=1)
        ends = PlannedStage(before=_embed(whole), layers=(), after=stage.after)
    return pipeline_stages(experiment, step, whole=stage, sent=sent, ends=ends, chosen=chosen)


def _split_residual(program: _DecoderStep) -> tuple[int, ...]:
    """One device's shard of the residual stream between blocks, including parallel streams."""
    batch, n_tokens, hidden = program.residual
    hyper = program.model.hyper
    width = (hidden,) if hyper is None else (hyper.n_streams, hidden)
    if program.is_split and program.step.phase is Phase.PREFILL:
        n_tokens //= program.plan.tp
    elif program.is_split:
        batch //= program.plan.tp
    return (batch, n_tokens, *width)


def _layer(
    program: _DecoderStep, layer: Layer, *, reads_received: bool
) -> tuple[PlannedCollective, ...]:
    """Attention, then an MLP, a mixture of experts, or both."""
    model, plan = program.model, program.plan
    is_prefill, prompt = program.step.phase is Phase.PREFILL, program.workload.prompt
    unused = model.attention.unused_weights(prompt) if is_prefill else ()
    weights = attention_weights(model, plan, layer)
    used = tuple(weight for weight in weights if weight.name not in unused)
    over_cp = context_collectives(
        program.experiment, program.step, layer, reads_received=reads_received
    )
    attention = _block(program, Part.ATTN, used, over_cp)
    mlp = _block(program, Part.MLP, dense_weights(model, layer)) if layer.has_mlp else ()
    mixture = _mixture(program) if layer.has_experts else ()
    of_inputs = _gather_weights(program, Part.MLP, *layer_input_weights(model))
    return (*attention, *mlp, *mixture, *of_inputs)


def _embed(program: _DecoderStep) -> tuple[PlannedCollective, ...]:
    """Vocabulary-parallel embedding: each tp device looks up its shard and the results are summed."""
    weights = {weight.name: weight for weight in outer_weights(program.model, program.plan)}
    tables = [weights["embed"], *draft_head_weights(program.model)]
    reductions = _reduce_output(program, Part.EMBED)
    if program.model.layer_inputs is not None:
        table = weights["layer_embed"]
        tables += [table, weights["layer_embed_proj"]]
        reductions += _reduction(program, Part.EMBED, (*program.residual[:2], table.shape[1]))
    return (*_gather_weights(program, Part.EMBED, *tables), *reductions)


def _head_weights(program: _DecoderStep) -> tuple[Weight, ...]:
    """The output head; none if it is tied to the embedding, which a step gathers once.

    In a pipeline, the last stage gathers the tied table for its head.
    """
    model, plan = program.model, program.plan
    is_gathered = not model.has_tied_embeddings or plan.pp > 1
    return (head_weight(model, plan),) * is_gathered


def _block(
    program: _DecoderStep,
    part: Part,
    weights: tuple[Weight, ...],
    over_cp: tuple[PlannedCollective, ...] = (),
) -> tuple[PlannedCollective, ...]:
    """Attention or MLP: takes the whole residual stream, returns a partial sum over tp."""
    return (
        *_gather_activations(program, part),
        *_gather_weights(program, part, *weights),
        *over_cp,
        *_reduce_output(program, part),
    )


def _mixture(program: _DecoderStep) -> tuple[PlannedCollective, ...]:
    """A mixture of experts.

    If the dispatch includes the tp axis, each device routes its own tokens and the shared experts
    are a separate block. Otherwise all tp devices route the same tokens, and one reduction covers
    routed and shared experts.
    """
    plan, model = program.plan, program.model
    routed = (
        *_dispatch(program),
        *_gather_weights(program, Part.MOE_EXPERTS, *expert_weights(model)),
        *_combine(program),
    )
    shared = shared_weights(model)
    if "tp" not in exchange_axes(plan, program.experiment.dispatch_form):
        return (
            *_gather_activations(program, Part.MOE_DISPATCH),
            *routed,
            *_gather_weights(program, Part.MOE_SHARED, *shared),
            *_reduce_output(program, Part.MOE_COMBINE),
        )
    gather = () if program.is_split else _gather_routed_tokens(program)
    return (*routed, *gather, *(_block(program, Part.MOE_SHARED, shared) if shared else ()))


def _dispatch(program: _DecoderStep) -> Iterator[PlannedCollective]:
    """All-gather of per-expert row counts, which TorchXLA programs do not need, then the dispatch all-to-all."""
    dispatch = program.experiment.dispatch(program.step.phase)
    if dispatch is None:
        return
    counts = (dispatch.n_ranks, dispatch.n_ranks * dispatch.n_local_experts)
    rows = _rows_shape(program, dispatch)
    axes = dispatch.axes
    if not program.is_torchxla:
        gather = program.collective(Part.MOE_DISPATCH, Kind.ALL_GATHER, axes, counts, "s32")
        yield _reduced_row(program, gather, counts[-1], reduced_for=ALWAYS_REDUCED)
    yield program.collective(Part.MOE_DISPATCH, Kind.ALL_TO_ALL, axes, rows)


def _combine(program: _DecoderStep) -> Iterator[PlannedCollective]:
    """The all-to-all that returns rows to the devices of their tokens."""
    dispatch = program.experiment.dispatch(program.step.phase)
    if dispatch is not None:
        shape = _rows_shape(program, dispatch)
        yield program.collective(Part.MOE_COMBINE, Kind.ALL_TO_ALL, dispatch.axes, shape)


def _rows_shape(program: _DecoderStep, dispatch: Dispatch) -> tuple[int, ...]:
    """Shape of the exchanged array: [ranks, slots, D], or [rows, D] if the exchange is ragged.

    The traffic of a ragged exchange depends on the routing. Averaged over devices it is at most the
    smaller of the array of rows and the receive buffer.
    """
    hidden = program.model.hidden
    if dispatch.n_slots is None:
        return (min(dispatch.n_rows, dispatch.n_buffer_rows), hidden)
    return (dispatch.n_ranks, dispatch.n_slots, hidden)


def _gather_routed_tokens(program: _DecoderStep) -> tuple[PlannedCollective, ...]:
    """All-gather over tp of the tokens that each tp device routed, including padding."""
    form = program.experiment.dispatch_form
    n_padded = routed_tokens(program.plan, program.n_local_tokens, form) * program.plan.tp
    shape = (n_padded, program.model.hidden)
    return _tp(program, Part.MOE_COMBINE, Kind.ALL_GATHER, shape)


def _logits(program: _DecoderStep) -> tuple[PlannedCollective, ...]:
    """Brings the last token to all tp devices, then all-gathers the logits [b,V]."""
    vocab = padded_vocab(program.model, program.plan)
    gathers = _tp(program, Part.LM_HEAD, Kind.ALL_GATHER, (program.local_batch, vocab))
    return (
        *_last_token(program),
        *_gather_weights(program, Part.LM_HEAD, *_head_weights(program)),
        *(
            _reduced_row(program, gather, vocab // program.plan.tp, reduced_for=REDUCED_FOR_ONE)
            for gather in gathers
        ),
    )


def _reduced_row(
    program: _DecoderStep, gather: PlannedCollective, n_local: int, *, reduced_for: ReducedFor
) -> PlannedCollective:
    """The gather of `n_local` elements of each device; for a single row, maybe by an all-reduce."""
    if program.facts is None:
        return gather
    multiple, most_devices = program.facts.gathered_rows.value
    if n_local % multiple == 0 and len(gather.groups[0]) <= most_devices:
        return gather
    return replace(gather, reduced_for=reduced_for)


def _last_token(program: _DecoderStep) -> tuple[PlannedCollective, ...]:
    """The last token of each sequence, on all devices of tp and cp.

    In prefill one device holds it and an all-reduce adds zeros from the others. In decode the
    batch is split over tp under sp, and is all-gathered. In TorchXLA programs, the last stage of a pipeline
    brings it to all of them, and the partitioner takes it from a split prompt with a permute that the
    all-reduce then repeats.
    """
    batch, n_tokens, hidden = program.residual
    is_prefill, is_piped = program.step.phase is Phase.PREFILL, program.plan.pp > 1
    gathers: tuple[PlannedCollective, ...] = ()
    if program.is_split and not is_prefill:
        shape = (batch, n_tokens, hidden)
        gathers = _tp(program, Part.LM_HEAD, Kind.ALL_GATHER, shape)
    axes = ("pp",) * (program.is_torchxla and is_piped)
    if is_prefill:
        axes += ("cp",) * (program.plan.cp > 1) + ("tp",) * program.is_split
    if program.is_torchxla and is_prefill and axes == ("tp",):
        sliced = program.collective(Part.LM_HEAD, Kind.PERMUTE, axes, (batch, 1, hidden))
        pairs = tuple((group[-1], group[0]) for group in sliced.groups)
        gathers = (replace(sliced, groups=pairs),)
    if not axes:
        return gathers
    all_reduce = program.collective(Part.LM_HEAD, Kind.ALL_REDUCE, axes, (batch, hidden))
    return (*gathers, all_reduce)


def _gather_activations(program: _DecoderStep, part: Part) -> tuple[PlannedCollective, ...]:
    """All-gather of the residual stream over tp, if it is split."""
    return _tp(program, part, Kind.ALL_GATHER, program.residual) if program.is_split else ()


def _reduce_output(program: _DecoderStep, part: Part) -> tuple[PlannedCollective, ...]:
    """Sum of a block's partial outputs over tp."""
    return _reduction(program, part, program.residual)


def _reduction(
    program: _DecoderStep, part: Part, shape: tuple[int, ...]
) -> tuple[PlannedCollective, ...]:
    """Sum of an array of tokens over tp: all-reduce, or reduce-scatter under sp."""
    if not program.is_split:
        return _tp(program, part, Kind.ALL_REDUCE, shape)
    rule = _reduced_sums(program)
    scatters = _tp(program, part, Kind.REDUCE_SCATTER, shape)
    return scatters if rule is None else tuple(replace(s, reduced_for=rule) for s in scatters)


def _reduced_sums(program: _DecoderStep) -> ReducedFor | None:
    """When the compiler makes an all-reduce of a reduce-scatter over tp: over a whole slice, or of rows alone.

    A sum has rows alone, a matrix, in decode and in the prefill of a single sequence, which TorchXLA
    programs scatter.
    """
    facts, topology, tp = program.facts, program.experiment.topology, program.plan.tp
    if facts is None:
        return None
    if (
        tp == topology.n_devices
        and tuple(sorted(topology.grid)) in facts.grids_without_scatters.value
    ):
        return ALWAYS_REDUCED
    has_rows = program.residual[1] == 1
    if program.is_torchxla and not has_rows:
        return None
    if facts.scattered_rows.value is None:
        return ALWAYS_REDUCED if has_rows else REDUCED_FOR_ONE
    multiple, most_bytes = facts.scattered_rows.value
    if has_rows:
        return ReducedFor(n_sequences=0, multiple=multiple * tp)
    return ReducedFor(n_sequences=1, over_bytes=most_bytes * tp)


def _tp(
    program: _DecoderStep, part: Part, kind: Kind, shape: tuple[int, ...]
) -> tuple[PlannedCollective, ...]:
    """A collective of activations over tp; none if tp=1."""
    return () if program.plan.tp == 1 else (program.collective(part, kind, ("tp",), shape),)


def _gather_weights(
    program: _DecoderStep, part: Part, *weights: Weight
) -> tuple[PlannedCollective, ...]:
    """One all-gather per weight that fsdp splits; none if fsdp=1."""
    plan, dtype = program.plan, program.workload.weight_dtype
    if plan.fsdp == 1:
        return ()
    arrays = gathered_arrays(weights, plan, dtype)
    if program.is_torchxla:
        arrays = _joined(arrays, [w.name for w in weights if w.fsdp_dim(plan) is not None])
    return tuple(
        program.collective(part, Kind.ALL_GATHER, ("fsdp",), shape, stored_dtype)
        for shape, stored_dtype in arrays
    )


def _joined(
    arrays: tuple[tuple[tuple[int, ...], str], ...], names: list[str]
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """The arrays of weights as transformers stores them: `JOINED` ones together with those before them."""
    joined: list[tuple[tuple[int, ...], str]] = []
    for name, (shape, dtype) in zip(names, arrays, strict=True):
        width = joined.pop()[0][-1] if name in JOINED else 0
        joined.append(((*shape[:-1], shape[-1] + width), dtype))
    return tuple(joined)
