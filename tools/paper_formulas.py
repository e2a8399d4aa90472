"""Communication volumes of one request, by the formulas of Xu et al.

Source: "Characterizing Communication Patterns in Distributed Large Language Model Inference",
section III, formulas (1) to (7), symbols of Table I. Volumes are in bytes, scaled by the bus
bandwidth factors of nccl-tests (doc/PERFORMANCE.md): 2(t-1)/t for all-reduce, (t-1)/t for
all-gather, 1 for gather and point to point. `docs/evidence/paper.md` lists what the formulas leave out and
where they disagree with the paper's own tables.
"""

from dataclasses import dataclass
from fractions import Fraction

from meshscope.errors import PlanError, SpecError
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine
from meshscope.units import DTYPE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCase:
    """The symbols of Table I under meshscope's names."""

    hidden: int  # h
    n_layers: int  # L
    vocab: int  # v
    element_bytes: Fraction  # b
    tp: int  # t
    pp: int  # p
    prompt: int  # S_p, tokens
    output: int  # S_d, tokens

    @property
    def n_tokens(self) -> int:
        """S_p + S_d - 1, tokens through the layers: prefill produces the first output token."""
        return self.prompt + self.output - 1

    @property
    def hidden_states_bytes(self) -> Fraction:
        """(S_p + S_d - 1) x h x b, the hidden states of all tokens in bytes."""
        return self.n_tokens * self.hidden * self.element_bytes

    @property
    def all_reduce_factor(self) -> Fraction:
        """2(t-1)/t, wire bytes per payload byte of an all-reduce."""
        return 2 * self.all_gather_factor

    @property
    def all_gather_factor(self) -> Fraction:
        """(t-1)/t, wire bytes per payload byte of an all-gather."""
        return Fraction(self.tp - 1, self.tp)


def case_of(experiment: Experiment) -> PaperCase:
    """The paper's symbols for an experiment with vLLM's conventions and batch 1."""
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    if experiment.engine is not Engine.VLLM:
        raise PlanError("the paper's formulas describe vLLM. Use --engine vllm.")
    if workload.batch != 1:
        raise SpecError(
            f"batch={workload.batch}: the paper's formulas are for one request. Use --batch 1."
        )
    return PaperCase(
        hidden=model.hidden,
        n_layers=model.n_layers,
        vocab=model.vocab,
        element_bytes=Fraction(DTYPE_BITS[workload.activation_dtype], 8),
        tp=plan.tp,
        pp=plan.pp,
        prompt=workload.prompt,
        output=workload.output,
    )


def volume_bytes(case: PaperCase) -> Fraction:
    """Volume plotted in figures 6 and 7, in bytes: formula (1), (2) or (3), by the plan's axes."""
    if case.pp == 1:
        return tensor_parallel_bytes(case)
    return pipeline_parallel_bytes(case) if case.tp == 1 else hybrid_bytes(case)


def tensor_parallel_bytes(case: PaperCase) -> Fraction:
    """Formula (1), V_tp in bytes: the all-reduces and gathers of one worker.

    Valid for t > 1 only: at t=1 the all-reduces vanish and the gather term does not.
    """
    n_all_reduces = 2 * case.n_layers + 1
    return n_all_reduces * case.hidden_states_bytes * case.all_reduce_factor + hybrid_gather_bytes(
        case
    )


def pipeline_parallel_bytes(case: PaperCase) -> Fraction:
    """Formula (2), V_pp in bytes: transfers over all stage boundaries."""
    return (case.pp - 1) * 2 * case.hidden_states_bytes


def hybrid_bytes(case: PaperCase) -> Fraction:
    """Formula (3), V_hybrid in bytes.

    The sum mixes workers: the all-reduces of one stage, the gather of the last stage, and the
    transfers over all boundaries.
    """
    return (
        hybrid_all_reduce_bytes(case)
        + hybrid_all_gather_bytes(case)
        + hybrid_gather_bytes(case)
        + hybrid_point_to_point_bytes(case)
    )


def hybrid_all_reduce_bytes(case: PaperCase) -> Fraction:
    """Formula (4), V_allreduce in bytes: one worker of a stage, without the embedding's all-reduce."""
    return Fraction(2 * case.n_layers, case.pp) * case.hidden_states_bytes * case.all_reduce_factor


def hybrid_all_gather_bytes(case: PaperCase) -> Fraction:
    """Formula (5), V_allgather in bytes: one worker of each receiving stage."""
    return 2 * (case.pp - 1) * case.hidden_states_bytes * case.all_gather_factor


def hybrid_gather_bytes(case: PaperCase) -> Fraction:
    """Formula (6), V_gather in bytes: one worker's shard of the logits of all output tokens."""
    return case.output * Fraction(case.vocab, case.tp) * case.element_bytes


def hybrid_point_to_point_bytes(case: PaperCase) -> Fraction:
    """Formula (7), V_p2p in bytes: one worker of each sending stage."""
    return (case.pp - 1) * 2 * case.hidden_states_bytes / case.tp
