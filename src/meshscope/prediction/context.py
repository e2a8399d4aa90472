"""Context-parallel collectives in one attention layer of meshscope's own decoder."""

from meshscope.events.enums import Kind, Part, Phase
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms.attention import AttentionStep
from meshscope.plans.context_form import (
    ContextForm,
    cache_slots,
    local_tokens,
    ring_pairs,
    ring_sends,
)
from meshscope.plans.experiment import Experiment
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStep
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
