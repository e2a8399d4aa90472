"""Where devices meet in meshscope's own dense decoder, by the rules of its manual partitioner.

Dimensions: b batch of one device, s tokens of a step, D hidden, V padded vocabulary.
"""

from dataclasses import dataclass

from meshscope.arch.model import Model
from meshscope.plan.experiment import Experiment
from meshscope.plan.plan import Plan
from meshscope.plan.weights import (
    Weight,
    attention_weights,
    mlp_weights,
    outer_weights,
    padded_vocab,
)
from meshscope.plan.workload import Workload
from meshscope.predict.meeting import Meeting, Stage, Step
from meshscope.table.kinds import Kind, Part, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """One step of the decoder as one device runs it."""

    model: Model
    plan: Plan
    workload: Workload
    step: Step

    @property
    def local_batch(self) -> int:
        return self.workload.batch // self.plan.data_size

    @property
    def residual(self) -> tuple[int, int, int]:
        """[b,s,D], the residual stream of this device's sequences, whole."""
        return (self.local_batch, self.step.n_tokens, self.model.hidden)

    @property
    def is_split(self) -> bool:
        """Whether the residual stream is split over tp between the blocks.

        Prefill splits the sequence. Decode, with one token a sequence, splits the batch where tp
        divides it, and is plain tensor parallelism where it does not.
        """
        is_prefill = self.step.phase is Phase.PREFILL
        return self.plan.sp and (is_prefill or self.local_batch % self.plan.tp == 0)


def meshscope_stages(experiment: Experiment, step: Step) -> tuple[Stage, ...]:
    """The meetings of one step of our program; it has no pipeline, so it is one stage."""
    program = _Program(
        model=experiment.model, plan=experiment.plan, workload=experiment.workload, step=step
    )
    stage = Stage(
        before=_embedded(program),
        layer=(
            *_block(program, Part.ATTN, attention_weights(program.model, program.plan)),
            *_block(program, Part.MLP, mlp_weights(program.model)),
        ),
        layers=range(program.model.n_layers),
        after=_logits(program),
    )
    return (stage,)


def _embedded(program: _Program) -> tuple[Meeting, ...]:
    """Each tp device looks up its share of the vocabulary; the sum of the shares is the residual stream."""
    return (*_gathered(program, Part.EMBED, _table(program)), *_summed(program, Part.EMBED))


def _table(program: _Program) -> Weight:
    """The embedding."""
    return outer_weights(program.model, program.plan)[0]


def _heads(program: _Program) -> tuple[Weight, ...]:
    """The output head; none where it is tied to the embedding, which a step gathers once."""
    return outer_weights(program.model, program.plan)[2:]


def _block(program: _Program, part: Part, weights: tuple[Weight, ...]) -> tuple[Meeting, ...]:
    """Attention or MLP: the whole residual stream in, a partial sum over tp out."""
    return (
        *_entered(program, part),
        *_gathered(program, part, *weights),
        *_summed(program, part),
    )


def _logits(program: _Program) -> tuple[Meeting, ...]:
    """The last token of every sequence to every tp device, then the logits of the whole vocabulary."""
    logits = (program.local_batch, padded_vocab(program.model, program.plan))
    return (
        *_last(program),
        *_gathered(program, Part.LM_HEAD, *_heads(program)),
        *_tp(program, Part.LM_HEAD, Kind.ALL_GATHER, logits),
    )


def _last(program: _Program) -> tuple[Meeting, ...]:
    """In prefill one device of tp has the last token and the others add zeros; in decode each has a share."""
    if not program.is_split:
        return ()
    batch, n_tokens, hidden = program.residual
    if program.step.phase is Phase.PREFILL:
        return _tp(program, Part.LM_HEAD, Kind.ALL_REDUCE, (batch, hidden))
    return _tp(program, Part.LM_HEAD, Kind.ALL_GATHER, (batch, n_tokens, hidden))


def _entered(program: _Program, part: Part) -> tuple[Meeting, ...]:
    """The residual stream whole again, where it is split."""
    return _tp(program, part, Kind.ALL_GATHER, program.residual) if program.is_split else ()


def _summed(program: _Program, part: Part) -> tuple[Meeting, ...]:
    """The partial sums of the tp devices, added up: whole on each, or each its share of the sum."""
    kind = Kind.REDUCE_SCATTER if program.is_split else Kind.ALL_REDUCE
    return _tp(program, part, kind, program.residual)


def _tp(program: _Program, part: Part, kind: Kind, shape: tuple[int, ...]) -> tuple[Meeting, ...]:
    """One meeting of the tp devices with activations; none where tp is 1."""
    if program.plan.tp == 1:
        return ()
    dtype = program.workload.activation_dtype
    groups = program.plan.mesh.groups("tp")
    return (Meeting(part=part, kind=kind, axis="tp", groups=groups, shape=shape, dtype=dtype),)


def _gathered(program: _Program, part: Part, *weights: Weight) -> tuple[Meeting, ...]:
    """One all-gather for each weight that fsdp splits; none where fsdp is 1."""
    plan, dtype = program.plan, program.workload.weight_dtype
    if plan.fsdp == 1:
        return ()
    return tuple(
        Meeting(
            part=part,
            kind=Kind.ALL_GATHER,
            axis="fsdp",
            groups=plan.mesh.groups("fsdp"),
            shape=weight.gathered_shape(plan),
            dtype=dtype,
        )
        for weight in weights
        if weight.fsdp_dim is not None
    )
