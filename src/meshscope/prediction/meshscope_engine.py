"""Where devices meet in meshscope's own decoder, by the rules of its manual partitioner.

Dimensions: b batch of one device, s tokens of a step, D hidden, V padded vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshscope.events.enums import Kind, Part, Phase
from meshscope.prediction.context import context_meetings
from meshscope.prediction.pipeline import pipelined
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStep, Stage
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import CompressedAttention, Layer, MlpKind, Model
from meshscope.spec.plan.context_form import local_tokens
from meshscope.spec.plan.dispatch import Dispatch, exchange_axes, routed_tokens
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.weights import (
    Weight,
    attention_weights,
    dense_weights,
    expert_weights,
    outer_weights,
    padded_vocab,
    shared_weights,
)
from meshscope.spec.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """One step of the decoder as one device runs it, on one of its micro-batches or on all."""

    experiment: Experiment
    step: PlannedStep
    n_microbatches: int = 1

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
        return self.workload.batch // self.plan.data_size // self.n_microbatches

    @property
    def residual(self) -> tuple[int, int, int]:
        """[b,s,D], the residual stream of this device's sequences; whole, but for cp."""
        n_tokens = local_tokens(self.plan, self.step.phase, self.step.n_tokens)
        return (self.local_batch, n_tokens, self.model.hidden)

    @property
    def n_local_tokens(self) -> int:
        """Tokens of the residual stream."""
        return self.residual[0] * self.residual[1]

    @property
    def is_split(self) -> bool:
        """Whether the residual stream is split over tp between the blocks.

        Prefill splits the sequence. Decode, with one token a sequence, splits the batch where tp
        divides it, and is plain tensor parallelism where it does not.
        """
        is_prefill = self.step.phase is Phase.PREFILL
        return self.plan.sp and (is_prefill or self.local_batch % self.plan.tp == 0)


def meshscope_stages(experiment: Experiment, step: PlannedStep) -> tuple[Stage, ...]:
    """The meetings of one step of our program, by stage of its pipeline if it has one."""
    program = _Program(
        experiment=experiment,
        step=step,
        n_microbatches=experiment.n_microbatches(step.phase),
    )
    of_kind = {layer: _layer(program, layer) for layer in dict.fromkeys(program.model.layers)}
    stage = Stage(
        before=_embedded(program),
        layers=tuple((index, of_kind[layer]) for index, layer in enumerate(program.model.layers)),
        after=_logits(replace(program, n_microbatches=1)),
    )
    return pipelined(experiment, step, whole=stage, handed_on=_split_residual(program))


def _split_residual(program: _Program) -> tuple[int, ...]:
    """What one device holds of the residual stream between the blocks, all parallel streams of it."""
    batch, n_tokens, hidden = program.residual
    hyper = program.model.hyper
    width = (hidden,) if hyper is None else (hyper.n_streams, hidden)
    if program.is_split and program.step.phase is Phase.PREFILL:
        n_tokens //= program.plan.tp
    elif program.is_split:
        batch //= program.plan.tp
    return (batch, n_tokens, *width)


def _layer(program: _Program, layer: Layer) -> tuple[PlannedCollective, ...]:
    """Attention, then a dense MLP or a mixture of experts."""
    model, plan = program.model, program.plan
    weights = _used(program, attention_weights(model, plan, layer))
    across = context_meetings(program.experiment, program.step, layer)
    attention = _block(program, Part.ATTN, weights, across)
    if layer.mlp is MlpKind.DENSE:
        return (*attention, *_block(program, Part.MLP, dense_weights(model)))
    return (*attention, *_mixture(program))


def _used(program: _Program, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Without the queries of an indexer that has nothing to choose from: a prompt without an entry."""
    attention = program.model.attention
    if program.step.phase is Phase.DECODE or not isinstance(attention, CompressedAttention):
        return weights
    if program.workload.prompt >= attention.sparse_rate:
        return weights
    return tuple(w for w in weights if w.name not in {"index_wq", "index_weights"})


def _embedded(program: _Program) -> tuple[PlannedCollective, ...]:
    """Each tp device looks up its share of the vocabulary; the sum of the shares is the residual stream."""
    return (*_gathered(program, Part.EMBED, _table(program)), *_summed(program, Part.EMBED))


def _table(program: _Program) -> Weight:
    """The embedding."""
    return outer_weights(program.model, program.plan)[0]


def _heads(program: _Program) -> tuple[Weight, ...]:
    """The output head; none where it is tied to the embedding, which a step gathers once.

    Of a pipeline, it is the last stage that gathers the table for its head.
    """
    table, _, *head = outer_weights(program.model, program.plan)
    return tuple(head or [table] * (program.plan.pp > 1))


def _block(
    program: _Program,
    part: Part,
    weights: tuple[Weight, ...],
    across: tuple[PlannedCollective, ...] = (),
) -> tuple[PlannedCollective, ...]:
    """Attention or MLP: the whole residual stream in, a partial sum over tp out."""
    return (
        *_entered(program, part),
        *_gathered(program, part, *weights),
        *across,
        *_summed(program, part),
    )


def _mixture(program: _Program) -> tuple[PlannedCollective, ...]:
    """A mixture of experts.

    Where rows travel over tp, too, each device routes its own tokens and the shared experts are a
    block of their own; else all of tp route the same tokens and the sums are taken together.
    """
    plan, model = program.plan, program.model
    routed = (
        *_dispatched(program),
        *_gathered(program, Part.MOE_EXPERTS, *expert_weights(model)),
        *_combined(program),
    )
    shared = shared_weights(model)
    if "tp" not in exchange_axes(plan):
        return (
            *_entered(program, Part.MOE_DISPATCH),
            *routed,
            *_gathered(program, Part.MOE_SHARED, *shared),
            *_summed(program, Part.MOE_COMBINE),
        )
    together = () if program.is_split else tuple(_regathered(program))
    return (*routed, *together, *(_block(program, Part.MOE_SHARED, shared) if shared else ()))


def _dispatched(program: _Program) -> Iterator[PlannedCollective]:
    """Everyone's number of rows for each expert to everyone, then the rows to their experts."""
    dispatch = program.experiment.dispatch(program.step.phase)
    if dispatch is None:
        return
    of_experts = (dispatch.n_local_experts,) if dispatch.n_local_experts > 1 else ()
    counts = (dispatch.n_ranks, dispatch.n_ranks, *of_experts)
    yield _exchange(program, dispatch, Part.MOE_DISPATCH, Kind.ALL_GATHER, counts, dtype="s32")
    yield _exchange(program, dispatch, Part.MOE_DISPATCH, Kind.ALL_TO_ALL, _sent(program, dispatch))


def _combined(program: _Program) -> Iterator[PlannedCollective]:
    """The rows back to their tokens."""
    dispatch = program.experiment.dispatch(program.step.phase)
    if dispatch is not None:
        shape = _sent(program, dispatch)
        yield _exchange(program, dispatch, Part.MOE_COMBINE, Kind.ALL_TO_ALL, shape)


def _sent(program: _Program, dispatch: Dispatch) -> tuple[int, ...]:
    """The array of the exchange: a device's slots for each device, or its rows as they are.

    Of a ragged exchange, what travels depends on the routing; no more than the smaller of the
    array of rows and the buffer that receives them, on average over the devices.
    """
    hidden = program.model.hidden
    if dispatch.n_slots is None:
        return (min(dispatch.n_rows, dispatch.n_buffer_rows), hidden)
    return (dispatch.n_ranks, dispatch.n_slots, hidden)


def _exchange(  # noqa: PLR0913  a meeting's own fields
    program: _Program,
    dispatch: Dispatch,
    part: Part,
    kind: Kind,
    shape: tuple[int, ...],
    *,
    dtype: str | None = None,
) -> PlannedCollective:
    mesh = program.plan.mesh
    return PlannedCollective(
        part=part,
        kind=kind,
        axis="+".join(name for name in mesh.names if name in dispatch.axes),
        groups=mesh.groups(*dispatch.axes),
        shape=shape,
        dtype=dtype or program.workload.activation_dtype,
    )


def _regathered(program: _Program) -> tuple[PlannedCollective, ...]:
    """The tokens that each device of tp routed, on all of them again; padding included."""
    n_padded = routed_tokens(program.plan, program.n_local_tokens) * program.plan.tp
    shape = (n_padded, program.model.hidden)
    return _tp(program, Part.MOE_COMBINE, Kind.ALL_GATHER, shape)


def _logits(program: _Program) -> tuple[PlannedCollective, ...]:
    """The last token of every sequence to every tp device, then the logits of the whole vocabulary."""
    logits = (program.local_batch, padded_vocab(program.model, program.plan))
    return (
        *_last(program),
        *_gathered(program, Part.LM_HEAD, *_heads(program)),
        *_tp(program, Part.LM_HEAD, Kind.ALL_GATHER, logits),
    )


def _last(program: _Program) -> tuple[PlannedCollective, ...]:
    """In prefill one device has the last token and the others add zeros; in decode each of tp has a share."""
    batch, n_tokens, hidden = program.residual
    if program.step.phase is Phase.DECODE:
        shape = (batch, n_tokens, hidden)
        return _tp(program, Part.LM_HEAD, Kind.ALL_GATHER, shape) if program.is_split else ()
    axes = ("cp",) * (program.plan.cp > 1) + ("tp",) * program.is_split
    if not axes:
        return ()
    return (
        PlannedCollective(
            part=Part.LM_HEAD,
            kind=Kind.ALL_REDUCE,
            axis="+".join(axes),
            groups=program.plan.mesh.groups(*axes),
            shape=(batch, hidden),
            dtype=program.workload.activation_dtype,
        ),
    )


def _entered(program: _Program, part: Part) -> tuple[PlannedCollective, ...]:
    """The residual stream whole again, where it is split."""
    return _tp(program, part, Kind.ALL_GATHER, program.residual) if program.is_split else ()


def _summed(program: _Program, part: Part) -> tuple[PlannedCollective, ...]:
    """The partial sums of the tp devices, added up: whole on each, or each its share of the sum."""
    kind = Kind.REDUCE_SCATTER if program.is_split else Kind.ALL_REDUCE
    return _tp(program, part, kind, program.residual)


def _tp(
    program: _Program, part: Part, kind: Kind, shape: tuple[int, ...]
) -> tuple[PlannedCollective, ...]:
    """One meeting of the tp devices with activations; none where tp is 1."""
    if program.plan.tp == 1:
        return ()
    dtype = program.workload.activation_dtype
    groups = program.plan.mesh.groups("tp")
    return (
        PlannedCollective(part=part, kind=kind, axis="tp", groups=groups, shape=shape, dtype=dtype),
    )


def _gathered(program: _Program, part: Part, *weights: Weight) -> tuple[PlannedCollective, ...]:
    """One all-gather for each weight that fsdp splits; none where fsdp is 1."""
    plan, dtype = program.plan, program.workload.weight_dtype
    if plan.fsdp == 1:
        return ()
    return tuple(
        PlannedCollective(
            part=part,
            kind=Kind.ALL_GATHER,
            axis="fsdp",
            groups=plan.mesh.groups("fsdp"),
            shape=weight.gathered_shape(plan),
            dtype=dtype,
        )
        for weight in weights
        if weight.fsdp_dim(plan) is not None
    )
