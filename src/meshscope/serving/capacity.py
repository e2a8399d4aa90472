"""The largest batch and context that fit in the memory of a slice, and the tokens that its cache holds."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm

from meshscope.cost.memory import predicted_memory
from meshscope.errors import MeshscopeError, read_only
from meshscope.plans.chunks import (
    DEFAULT_CHUNK,
    POSITION_STEP,
    why_auto_is_whole,
    why_no_position_chunks,
)
from meshscope.plans.experiment import Experiment, experiment_of_record
from meshscope.plans.memory import Memory
from meshscope.plans.workload import MAX_BATCH, MAX_CONTEXT
from meshscope.store.run import RunRecord


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What fits on a slice with a plan, by the high end of the predicted memory.

    `largest_batch` is in steps of `batch_step` sequences at the prompt and output of the experiment,
    `largest_context` (prompt and output) in steps of `context_step` positions at its batch and output;
    0 if not even one step fits. Both are below the experiment's own if it may not fit, but a prompt that is no
    multiple of the step may fit once it is padded to one. `is_context_of_model` is whether the model, not memory, limits the context. `n_cache_tokens` are the KV cache positions over all
    sequences that fit with weights and temporary buffers; the experiment leaves `n_cache_tokens_left` unused.
    With `is_upper_bound`, temporary buffers are unknown and count as 0.
    """

    batch_step: int
    largest_batch: int
    context_step: int
    largest_context: int
    is_context_of_model: bool
    n_cache_tokens: int
    n_cache_tokens_left: int
    is_upper_bound: bool


def capacity_of(experiment: Experiment) -> Capacity | None:
    """The capacity of a slice for an experiment; None without a limit of HBM."""
    memory = predicted_memory(experiment)
    if memory.hbm_bytes is None:
        return None
    workload, context = experiment.workload, largest_context(experiment)
    # Positions of the cache over all sequences that fit, by the bytes of one more block of positions.
    step = _context_step(experiment)
    longer = predicted_memory(_resized(experiment, prompt=workload.prompt + step))
    block_bytes = longer.resident_bytes - memory.resident_bytes
    fixed_bytes = memory.resident_bytes - block_bytes * workload.context // step
    free_bytes = memory.hbm_bytes - fixed_bytes - (memory.temp_high_bytes or 0)
    n_tokens = max(0, free_bytes * workload.batch * step // block_bytes)
    return Capacity(
        batch_step=experiment.plan.data_size,
        largest_batch=largest_batch(experiment),
        context_step=step,
        largest_context=context.positions,
        is_context_of_model=context.is_of_model,
        n_cache_tokens=n_tokens,
        n_cache_tokens_left=max(0, n_tokens - workload.batch * workload.context),
        is_upper_bound=memory.temp_bytes is None,
    )


def largest_batch(experiment: Experiment) -> int:
    """The largest batch that fits at the prompt and output of an experiment on devices with known HBM."""
    step, limit = experiment.plan.data_size, MAX_BATCH
    if not _fits(experiment):
        limit = experiment.workload.batch - 1
    return step * _largest(lambda n: _fits(_resized(experiment, batch=n * step)), limit // step)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestContext:
    """Positions of prompt and output, 0 if none fit, and whether the model limits them, not memory."""

    positions: int
    is_of_model: bool


def largest_context(experiment: Experiment) -> LargestContext:
    """The largest context that fits at the batch and output of an experiment on devices with known HBM."""
    step, output = _context_step(experiment), experiment.workload.output
    of_model = max(0, (experiment.model.max_position or MAX_CONTEXT) - output) // step
    prompt, limit = experiment.workload.prompt, of_model
    if prompt % step == 0 and not _fits(experiment):
        limit = min(limit, prompt // step - 1)
    n = _largest(lambda n: _fits(_resized(experiment, prompt=n * step)), limit)
    return LargestContext(positions=n * step + output if n else 0, is_of_model=0 < n == of_model)


def capacity_of_run(run: RunRecord) -> Capacity | None:
    """The capacity for the request of a run; None if the run does not know one, or without HBM."""
    try:
        experiment = experiment_of_record(run.manifest.experiment)
    except MeshscopeError:  # an imported run does not know all of its experiment
        return None
    return None if experiment.is_part_of_decode else capacity_of(experiment)


def _context_step(experiment: Experiment) -> int:
    """Positions by which a prompt grows: whole blocks of the kernels, divisible by cp and by tp under sp."""
    plan = experiment.plan
    return lcm(POSITION_STEP * plan.cp, plan.tp if plan.sp else 1)


def _resized(experiment: Experiment, **sizes: int) -> Experiment:
    """The experiment with another batch or prompt, and the chunk that it chose, or the longest of the default rule.

    Memory then grows with either size: chunks that divide a batch evenly would make it jump.
    """
    workload, chunk = replace(experiment.workload, **sizes), experiment.workload.prefill_chunk
    reason = why_auto_is_whole(experiment.plan, experiment.program, experiment.engine)
    if experiment.with_auto_chunk().workload.prefill_chunk == chunk and reason is None:
        is_whole = why_no_position_chunks(experiment.model, experiment.plan) is not None
        chunk = max(DEFAULT_CHUNK, workload.prompt) if is_whole else DEFAULT_CHUNK
    return replace(experiment, workload=replace(workload, prefill_chunk=chunk))


def _fits(experiment: Experiment) -> bool:
    memory = predicted_memory(experiment)
    assert memory.hbm_bytes is not None
    return needed_bytes(memory) <= memory.hbm_bytes


def needed_bytes(memory: Memory) -> int:
    """The high end of the memory that a device needs; without temporary buffers if they are unknown."""
    return memory.resident_bytes + (memory.temp_high_bytes or 0)


def _largest(is_possible: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which all smaller ones are possible, too; by bisection.

    It starts small, because memory does not grow evenly where microbatches divide the batch.
    """
    low, high = 0, 1
    while high <= limit and is_possible(high):
        low, high = high, high * 2
    return low + bisect_left(
        range(low + 1, min(high, limit + 1)), x=True, key=lambda n: not is_possible(n)
    )
