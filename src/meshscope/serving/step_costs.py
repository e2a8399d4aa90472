"""What an engine has: seconds of its steps by the closed form, tabulated, and the blocks of its paged KV cache."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshscope.cost.closed_form import NO_LIMIT, closed_steps, plan_batch, plan_form
from meshscope.cost.memory import predicted_memory
from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.plans.caches import CacheLayout, device_cache_bytes
from meshscope.plans.experiment import Experiment

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
POINTS_PER_OCTAVE = 2  # of the tables: time is nearly linear between two points
MIN_CONTEXT = 16.0
BLOCK_TOKENS = 16
# Two lengths beyond every attention window: the difference is the cache that grows with the context.
_LENGTHS = (1 << 16, 1 << 17)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCosts:
    """Seconds of the steps of one engine, interpolated between points of the closed form.

    `decode_table_s` [sequences, contexts]; `prefill_table_s` [tokens, contexts], the time of a chunk of
    a prompt after a context.
    """

    n_sequences: FloatArray
    contexts: FloatArray
    decode_table_s: FloatArray
    n_tokens: FloatArray
    prefill_table_s: FloatArray
    _rows: dict[int, FloatArray] = field(default_factory=dict[int, FloatArray])
    _decode_rows: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    _prefill_rows: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    _at: list[float] = field(default_factory=list[float])

    @property
    def reached(self) -> list[tuple[Phase, int]]:
        """The sizes that were asked for: sequences of a decode step, and tokens of a step that prefills."""
        decoded = {*self._rows, *self._decode_rows}
        return [
            *((Phase.DECODE, n) for n in decoded),
            *((Phase.PREFILL, n) for n in self._prefill_rows),
        ]

    def scaled(self, ratios: Mapping[Phase, Mapping[int, float]]) -> "StepCosts":
        """The costs with these factors at these sizes, and between them by the logarithm of the size."""

        def factors(phase: Phase, sizes: FloatArray) -> FloatArray:
            known = ratios.get(phase) or {1: 1.0}
            return np.interp(np.log(sizes), np.log([*known]), [*known.values()])[:, None]

        return StepCosts(
            n_sequences=self.n_sequences,
            contexts=self.contexts,
            decode_table_s=self.decode_table_s * factors(Phase.DECODE, self.n_sequences),
            n_tokens=self.n_tokens,
            prefill_table_s=self.prefill_table_s * factors(Phase.PREFILL, self.n_tokens),
        )

    def decode_s(self, n_sequences: int, contexts: FloatArray) -> FloatArray:
        """[n] decode steps of `n_sequences` whose mean context is `contexts` [n]."""
        row = self._rows.get(n_sequences)
        if row is None:
            row = _between(self.n_sequences, self.decode_table_s, n_sequences)
            self._rows[n_sequences] = row
        return np.interp(contexts, self.contexts, row)

    def decode_step_s(self, n_sequences: int, context: float) -> float:
        """One decode step of `n_sequences` with this mean context."""
        row = self._decode_rows.get(n_sequences)
        if row is None:
            row = _between(self.n_sequences, self.decode_table_s, n_sequences).tolist()
            self._decode_rows[n_sequences] = row
        return self._interpolated(context, row)

    def mixed_s(self, n_sequences: int, context: float, n_tokens: int, past: float) -> float:
        """A step that prefills `n_tokens` and decodes `n_sequences`.

        Products run over all tokens at once and read the weights once, so the step is a prefill of all its
        tokens, plus the caches that decode attention reads beyond an empty context.
        """
        row = self._prefill_rows.get(n_tokens + n_sequences)
        if row is None:
            row = _between(self.n_tokens, self.prefill_table_s, n_tokens + n_sequences).tolist()
            self._prefill_rows[n_tokens + n_sequences] = row
        prefill_s = self._interpolated(past, row)
        if not n_sequences:
            return prefill_s
        full_s = self.decode_step_s(n_sequences, context)
        return prefill_s + full_s - self.decode_step_s(n_sequences, MIN_CONTEXT)

    def _interpolated(self, context: float, row: list[float]) -> float:
        """As `np.interp`, which takes longer for one value."""
        at = self._at
        if not at:
            at.extend(self.contexts.tolist())
        above = bisect_right(at, context)
        if not 0 < above < len(at):
            return row[min(above, len(at) - 1)]
        low, low_s = at[above - 1], row[above - 1]
        return low_s + (row[above] - low_s) * (context - low) / (at[above] - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPrograms:
    """Programs compiled for the sizes of a load, all loaded on each device.

    `ratios` are compiled over closed-form seconds, by sequences of a decode step and tokens of a prefill. One program
    runs at a time, so the largest temporaries count, and the code of all.
    """

    name: str
    ratios: Mapping[Phase, Mapping[int, float]]
    code_bytes: int
    temp_bytes: int
    resident_bytes: float | None  # weights and cache
    hbm_bytes: int | None

    @property
    def n_programs(self) -> int:
        """Sizes of both phases."""
        return sum(map(len, self.ratios.values()))

    @property
    def room_bytes(self) -> float | None:
        """What the HBM of a device has beyond all of it; None if that is unknown."""
        if self.resident_bytes is None or self.hbm_bytes is None:
            return None
        return self.hbm_bytes - self.resident_bytes - self.code_bytes - self.temp_bytes

    @property
    def fits(self) -> bool | None:
        """Whether all fits the HBM of a device; None if that is unknown."""
        return None if self.room_bytes is None else self.room_bytes >= 0


def _between(points: FloatArray, table: FloatArray, value: float) -> FloatArray:
    value = min(max(value, points[0]), points[-1])
    above = min(int(np.searchsorted(points, value)), len(points) - 1)
    below = max(above - 1, 0)
    width = points[above] - points[below]
    share = (value - points[below]) / width if width else 0.0
    return table[below] * (1 - share) + table[above] * share


def tabulated_costs(  # noqa: PLR0913  what an engine and its load bound
    experiment: Experiment,
    *,
    max_sequences: int,
    max_step_tokens: int,
    max_context: int,
    profile: ChipProfile | None = None,
    cache_reads: float = 1.0,
    fused: Experiment | None = None,
    fused_from: int = 0,
    **of_server: Any,
) -> StepCosts:
    """The step costs of a batch of the plan: of a data-parallel rank, and of one stage of a pipeline.

    What decode steps take longer with a longer context counts `cache_reads` times. `of_server` are a server's kernels
    and compiler options, as in `plan_form`.
    Steps that prefill with at least `fused_from` tokens of all ranks are those of `fused`, if it is given.
    A step passes through all stages of a pipeline. With sp, steps of at least tp sequences are padded to
    a multiple of tp, so that sp splits them.
    """
    plan = experiment.plan
    cases = [(Phase.PREFILL, 1), (Phase.DECODE, 1), *([(Phase.DECODE, plan.tp)] if plan.sp else [])]
    sizes = [(phase, _resized(experiment, n_sequences=n, output=2)) for phase, n in cases]
    if fused is not None:
        sizes.append((Phase.PREFILL, _resized(fused, output=2)))
    forms = plan_batch(
        [plan_form(one, phase, profile=profile, **of_server) for phase, one in sizes]
    )
    contexts = _grid(MIN_CONTEXT, float(max_context))
    sequences = _grid(1.0, float(max_sequences))
    tokens = _grid(1.0, float(max_step_tokens + max_sequences))

    def steps_s(at: IntArray, n: FloatArray, prompt: FloatArray, chunk: FloatArray) -> FloatArray:
        sizes = {"batch": n * plan.data_size, "prompt": prompt, "chunk": chunk}
        return closed_steps(forms, at, output=np.full(len(prompt), 2.0), **sizes).step_s

    grid = np.meshgrid(sequences, contexts, indexing="ij")
    many, context = (one.ravel() for one in grid)
    whole = np.full(len(many), NO_LIMIT)
    is_split = (many >= plan.tp) & plan.sp
    padded = np.where(is_split, np.ceil(many / plan.tp) * plan.tp, many)
    # With two output tokens, the one decode step attends to the prompt and its own position.
    decode = steps_s(1 + is_split.astype(np.int64), padded, np.maximum(context - 1, 1.0), whole)
    decode = decode.reshape(len(sequences), len(contexts))
    decode = decode[:, :1] + cache_reads * (decode - decode[:, :1])
    chunk, context = (one.ravel() for one in np.meshgrid(tokens, contexts, indexing="ij"))
    n_past = np.round(np.where(context == contexts[0], 0.0, context) / chunk)
    one, is_fused = (
        np.ones(len(chunk)),
        (chunk * plan.data_size >= fused_from) & (fused is not None),
    )
    prefill = np.where(is_fused, len(cases), 0)
    after = steps_s(prefill, one, (n_past + 1) * chunk, chunk)
    before = np.where(n_past, steps_s(prefill, one, np.maximum(n_past, 1) * chunk, chunk), 0)
    return StepCosts(
        n_sequences=sequences,
        contexts=contexts,
        decode_table_s=decode,
        n_tokens=tokens,
        prefill_table_s=(after - before).reshape(len(tokens), len(contexts)),
    )


def _grid(first: float, last: float) -> FloatArray:
    n = int(np.ceil(np.log2(last / first) * POINTS_PER_OCTAVE)) + 1 if last > first else 1
    points = np.unique(np.round(first * 2 ** (np.arange(n) / POINTS_PER_OCTAVE)))
    return np.append(points[points < last], last)


def past_of(chunks: Sequence[tuple[int, int]]) -> float:
    """The context after which one chunk of all tokens has as much attention as these (tokens, context).

    Attention of a chunk covers tokens x (context + tokens / 2) pairs. Several short prompts have fewer
    pairs than one of their sum, and count as one without a context.
    """
    n_tokens = sum(tokens for tokens, _ in chunks)
    pairs = sum(tokens * (context + tokens / 2) for tokens, context in chunks)
    return max(pairs / n_tokens - n_tokens / 2, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBlocks:
    """Blocks of `block_tokens` positions on a device; a sequence takes `n_fixed` more, for windows."""

    n_blocks: int
    n_fixed: int = 0
    block_tokens: int = BLOCK_TOKENS
    resident_bytes: float | None = None  # blocks and weights on a device

    def of(self, n_tokens: int) -> int:
        """Blocks of a sequence with this many positions."""
        return -(-n_tokens // self.block_tokens) + self.n_fixed

    @property
    def n_tokens(self) -> int:
        """Positions of the longest sequence that fits alone."""
        return (self.n_blocks - self.n_fixed) * self.block_tokens


def cache_blocks(
    experiment: Experiment,
    *,
    memory_frac: float,
    block_tokens: int = BLOCK_TOKENS,
    layout: CacheLayout | None = None,
) -> CacheBlocks:
    """The blocks, in the experiment's layout or another, that fit with the weights in this fraction of the HBM.

    The rest of the HBM is left to activations. SpecError if the weights leave no room, or the HBM of
    the chip is unknown.
    """
    memory = predicted_memory(experiment)
    if memory.hbm_bytes is None:
        raise SpecError(f"the HBM of {experiment.topology.chip.name} is unknown. Use a TPU or GPU.")
    assert memory.weights_bytes is not None
    fixed_bytes, token_bytes = sequence_bytes(experiment, layout)
    if not token_bytes:  # windows or states alone: a block for each sequence, of any length
        block_tokens = min(experiment.model.max_position or _LENGTHS[0], _LENGTHS[0])
        fixed_bytes, token_bytes = 0.0, fixed_bytes / block_tokens
    block_bytes = token_bytes * block_tokens
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
    n_fixed = ceil(fixed_bytes / block_bytes)
    return CacheBlocks(
        n_blocks=n_blocks,
        n_fixed=n_fixed,
        block_tokens=block_tokens,
        resident_bytes=memory.weights_bytes + n_blocks * n_batches * block_bytes,
    )


def sequence_bytes(
    experiment: Experiment, layout: CacheLayout | None = None
) -> tuple[float, float]:
    """Cache bytes of a sequence on one device, in the experiment's layout or another: a fixed part, and per position."""
    layout = layout or experiment.cache_layout
    short, long = (
        device_cache_bytes(one.model, one.plan, one.workload, layout=layout)
        for one in (_resized(experiment, prompt=n - 1, output=1) for n in _LENGTHS)
    )
    token_bytes = (long - short) / (_LENGTHS[1] - _LENGTHS[0])
    return max(short - token_bytes * _LENGTHS[0], 0.0), token_bytes


def _resized(experiment: Experiment, *, n_sequences: int = 1, **lengths: int) -> Experiment:
    batch = n_sequences * experiment.plan.data_size
    workload = replace(experiment.workload, batch=batch, prefill_chunk=None, **lengths)
    return replace(experiment, workload=workload)
