"""Where the residual stream of a transformers model lives, by the plan: specs of [B, S, D]."""

from dataclasses import dataclass

from meshscope.events.enums import Phase
from meshscope.programs.torchxla.layouts import Layouts, Spec
from meshscope.spec.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualStreams:
    """Specs of one phase: `residual` between blocks, `entered` inside them, `tokens` [B, S].

    `logits` [B, 1, V] is for where the head makes them, `rows` for where they leave. `is_split` says whether sp splits the residual stream over tp.
    """

    residual: Spec
    entered: Spec
    logits: Spec
    rows: Spec
    tokens: Spec
    is_split: bool


def streams_of(experiment: Experiment, phase: Phase, layouts: Layouts) -> ResidualStreams:
    """Sp splits the prompt in prefill; in decode the batch, where tp divides it."""
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
