"""The executions of prefill programs in a request, and the order of the tokens that they produce."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshscope.events.enums import Phase
from meshscope.spec.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRun:
    """One execution of a prefill program.

    `tokens` are its part of the prompt [B, S], `first_row` the first sequence on each device in the cache.
    The last chunk of a prompt produces the next tokens of its sequences.
    """

    program: str
    tokens: Any
    first_row: Any
    is_last: bool


def chunk_runs(experiment: Experiment, prompt: np.ndarray) -> Iterator[ChunkRun]:
    """The executions for a prompt [B, S], in order; each device has consecutive sequences."""
    chunks, programs = experiment.prefill_chunks, experiment.programs(Phase.PREFILL)
    shape = (experiment.plan.data_size, chunks.n_sequence_chunks, chunks.n_sequences, -1)
    by_chunk = prompt.reshape(shape)
    for number in range(chunks.n_sequence_chunks):
        rows = by_chunk[:, number].reshape(-1, prompt.shape[1])
        for program in programs:
            yield ChunkRun(
                program=program.name,
                tokens=rows[:, program.start : program.start + chunks.n_positions],
                first_row=np.int32(number * chunks.n_sequences),
                is_last=program is programs[-1],
            )


def merged_tokens(parts: Sequence[Any], *, data_size: int) -> Any:
    """The next tokens [B] in the order of the batch, from those of groups of sequences."""
    by_device = [part.reshape(data_size, -1) for part in parts]
    return jnp.concatenate(by_device, axis=1).reshape(-1)
