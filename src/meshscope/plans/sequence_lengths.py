"""Sequences of one step on one device: how many, and how many queries and keys each has."""

import re
from dataclasses import dataclass

from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.plans.caches import local_tokens
from meshscope.plans.experiment import Experiment

_LENGTHS = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*):([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLengths:
    """Equal sequences of a step, with the queries and the keys present of each."""

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


def parse_lengths(text: str) -> dict[Phase | None, tuple[SequenceLengths, ...]]:
    """Parses `63x1:1024,1x2048:8192`: sequences x new tokens of each : tokens of each that attention reads.

    `prefill=8x512:512,decode=64x1:1024` gives a list for each phase; without names, it is for all (None).
    """
    lengths: dict[Phase | None, tuple[SequenceLengths, ...]] = {}
    phase: Phase | None = None
    for piece in text.split(","):
        name, separator, rest = piece.strip().partition("=")
        if separator and name in set(Phase):
            phase = Phase(name)
        sequences = _sequences(text, rest if separator else name)
        lengths[phase] = (*lengths.get(phase, ()), sequences)
    return lengths


def _sequences(text: str, piece: str) -> SequenceLengths:
    match = _LENGTHS.fullmatch(piece.strip())
    if match is None:
        raise SpecError(
            f"lengths '{text}': '{piece.strip()}' is not SEQUENCESxTOKENS:CONTEXT. Give for example "
            "'64x1:1024' for 64 sequences that decode one token at a context of 1024."
        )
    n_sequences, n_queries, n_keys = map(int, match.groups())
    if n_queries > n_keys:
        raise SpecError(
            f"lengths '{text}': {n_queries} new tokens exceed the context of {n_keys}, which includes "
            "them. Give a context of at least the new tokens."
        )
    return SequenceLengths(n_sequences=n_sequences, n_queries=n_queries, n_keys=n_keys)
