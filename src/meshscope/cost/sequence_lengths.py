"""Sequences of one step on one device: how many, and how many queries and keys each has."""

from dataclasses import dataclass

from meshscope.events.enums import Phase
from meshscope.spec.experiment import Experiment
from meshscope.spec.plan.context_form import local_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLengths:
    """Sequences of a step, with the queries and the keys present of each."""

    n_sequences: int
    n_queries: int
    n_keys: float


def sequence_lengths(experiment: Experiment, phase: Phase) -> SequenceLengths:
    """The sequences of one device in one chunk of prefill, or in decode at the mean context."""
    plan, workload = experiment.plan, experiment.workload
    n_sequences = experiment.n_sequences(phase) // experiment.n_microbatches(phase)
    is_prefill = phase is Phase.PREFILL
    return SequenceLengths(
        n_sequences=max(1, n_sequences),
        n_queries=local_tokens(plan, phase, experiment.n_positions(phase)),
        n_keys=workload.prompt if is_prefill else workload.mean_context,
    )
