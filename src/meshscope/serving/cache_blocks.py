"""The paged KV cache of a device: how many blocks it has, and how many a sequence takes."""

from dataclasses import dataclass, replace
from math import ceil

from meshscope.errors import SpecError
from meshscope.plans.caches import device_cache_bytes
from meshscope.plans.experiment import Experiment
from meshscope.prediction.memory import predicted_memory

BLOCK_TOKENS = 16
# Two lengths beyond every attention window: the difference is the cache that grows with the context.
_LENGTHS = (1 << 16, 1 << 17)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBlocks:
    """Blocks of BLOCK_TOKENS positions on a device; a sequence takes `n_fixed` more, for windows."""

    n_blocks: int
    n_fixed: int = 0

    def of(self, n_tokens: int) -> int:
        """Blocks of a sequence with this many positions."""
        return -(-n_tokens // BLOCK_TOKENS) + self.n_fixed

    @property
    def n_tokens(self) -> int:
        """Positions of the longest sequence that fits alone."""
        return (self.n_blocks - self.n_fixed) * BLOCK_TOKENS


def cache_blocks(experiment: Experiment, *, memory_frac: float) -> CacheBlocks:
    """The blocks that fit beside the weights in this fraction of the HBM.

    The rest of the HBM is left to activations. SpecError if the weights leave no room, or the HBM of
    the chip is unknown.
    """
    memory = predicted_memory(experiment)
    if memory.hbm_bytes is None:
        raise SpecError(f"the HBM of {experiment.topology.chip.name} is unknown. Use a TPU or GPU.")
    assert memory.weights_bytes is not None
    fixed_bytes, token_bytes = sequence_bytes(experiment)
    block_bytes = token_bytes * BLOCK_TOKENS
    free_bytes = memory_frac * memory.hbm_bytes - memory.weights_bytes
    n_batches = experiment.plan.pp  # one in each stage of a pipeline; they share the cache
    n_blocks = int(free_bytes / block_bytes / n_batches) if free_bytes > 0 else 0
    if n_blocks < 1:
        raise SpecError(
            f"plan '{experiment.plan}' of {experiment.model.name}: the weights take "
            f"{memory.weights_bytes / 2**30:.2f} GiB per device and leave no room for a cache in "
            f"{memory_frac:g} of {memory.hbm_bytes / 2**30:.2f} GiB. Use more devices or a smaller "
            "--weight-dtype."
        )
    return CacheBlocks(n_blocks=n_blocks, n_fixed=ceil(fixed_bytes / block_bytes))


def sequence_bytes(experiment: Experiment) -> tuple[float, float]:
    """Cache bytes of a sequence on one device: those that do not grow, and those of each position."""
    short, long = (_sequence_bytes(experiment, n) for n in _LENGTHS)
    token_bytes = (long - short) / (_LENGTHS[1] - _LENGTHS[0])
    return max(short - token_bytes * _LENGTHS[0], 0.0), token_bytes


def _sequence_bytes(experiment: Experiment, n_tokens: int) -> int:
    """Bytes of the cache of one sequence on one device."""
    plan = experiment.plan
    workload = replace(
        experiment.workload, batch=plan.data_size, prompt=n_tokens - 1, output=1, prefill_chunk=None
    )
    return device_cache_bytes(experiment.model, plan, workload, layout=experiment.cache_layout)
