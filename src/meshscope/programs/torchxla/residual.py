"""Shardings of the residual stream [B, S, D] of a transformers model."""

from dataclasses import dataclass

from meshscope.events.enums import Phase
from meshscope.programs.torchxla.layouts import Layouts, Spec
from meshscope.spec.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualStreams:
    """Specs of one phase: `residual` between blocks, `entered` inside them, `tokens` [B, S].

    `logits` [B, 1, V] is the sharding at the head's output, `rows` that of the program's output.
    `is_split` is whether sp splits the residual stream over tp.
    """

    residual: Spec
    entered: Spec
    logits: Spec
    rows: Spec
    tokens: Spec
    is_split: bool


def streams_of(experiment: Experiment, phase: Phase, layouts: Layouts) -> ResidualStreams:
    """The specs of a phase: sp splits the prompt in prefill, and the batch in decode if tp divides it."""
    plan, workload = experiment.plan, experiment.workload
    data, tp = layouts.data, layouts.axes("tp")
    context = layouts.axes("cp") if phase is Phase.PREFILL else ()
    entered: Spec = (data, context, ())
    is_prefill = phase is Phase.PREFILL
    is_split = plan.sp and (is_prefill or workload.batch // plan.data_size % plan.tp == 0)
    residual = entered
    if is_split:
        residual = (data, (*context, *tp), ()) if is_prefill else ((*data, *tp), (), ())
    return ResidualStreams(
        residual=residual,
        entered=entered,
        logits=(data, (), tp),
        rows=(data, (), ()),
        tokens=(data, context),
        is_split=is_split,
    )
