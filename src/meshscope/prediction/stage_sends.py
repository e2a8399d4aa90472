"""The arrays that a device sends to its peer in the next pipeline stage, in order.

Dimensions: b sequences of a micro-batch, s tokens of a step of each, T positions attended to.
"""

from collections.abc import Iterator

from meshscope.events.enums import Phase
from meshscope.plans.caches import joined_narrow_heads, layer_cache
from meshscope.plans.context_form import cache_slots, local_tokens
from meshscope.plans.experiment import Experiment
from meshscope.plans.stages import stage_sends
from meshscope.prediction.planned_collective import PlannedStep

SentArray = tuple[tuple[int, ...], str]  # shape and dtype


def sent_arrays(
    experiment: Experiment, step: PlannedStep, residual: tuple[int, ...]
) -> tuple[SentArray, ...]:
    """The residual stream, and what layers of later stages read of earlier ones."""
    return (
        (residual, experiment.workload.activation_dtype),
        *_shared_entries(experiment, step),
        *_choice(experiment, step),
        *_layer_inputs(experiment, residual),
    )


def _layer_inputs(experiment: Experiment, residual: tuple[int, ...]) -> Iterator[SentArray]:
    """The embeddings [b,s,layers,width] of the layers behind the first stage, split like the residual stream.

    TorchXLA programs send none: all stages compute them.
    """
    inputs = experiment.model.layer_inputs
    if inputs is not None and not experiment.program.frontend.is_traced:
        n_layers = stage_sends(experiment.model, experiment.plan.pp).n_inputs
        shape = (*residual[:-1], n_layers, inputs.width)
        yield shape, experiment.workload.activation_dtype


def _choice(experiment: Experiment, step: PlannedStep) -> Iterator[SentArray]:
    """The mask [b,s,T] of the positions that the last indexer chose."""
    if stage_sends(experiment.model, experiment.plan.pp).has_choice:
        workload, n_positions = experiment.workload, step.n_tokens
        if step.phase is Phase.DECODE:
            n_positions = cache_slots(experiment.plan, workload)
        yield (*_step_shape(experiment, step), n_positions), "pred"


def _shared_entries(experiment: Experiment, step: PlannedStep) -> Iterator[SentArray]:
    """The entries [b,heads,s,width] of the step in each cache that layers of later stages share."""
    model, plan, cache_dtype = experiment.model, experiment.plan, experiment.workload.cache_dtype
    n_sequences, n_tokens = _step_shape(experiment, step)
    for kind in stage_sends(model, plan.pp).caches:
        arrays = layer_cache(model, plan, kind)
        if experiment.kernels.decode_attention.kernel is not None:
            arrays = joined_narrow_heads(arrays)
        for array in arrays:
            *heads, width = array.local_shape(plan)
            yield (n_sequences, *heads, n_tokens, width), array.dtype or cache_dtype


def _step_shape(experiment: Experiment, step: PlannedStep) -> tuple[int, int]:
    """Sequences of a micro-batch on one device, and tokens of the step of each."""
    is_prefill = step.phase is Phase.PREFILL
    n_tokens = step.n_tokens if is_prefill else experiment.workload.decode_tokens
    n_sequences = experiment.n_sequences(step.phase) // experiment.n_microbatches(step.phase)
    return n_sequences, local_tokens(experiment.plan, step.phase, n_tokens)
