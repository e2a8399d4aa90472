"""The combinations of one plan with batches, precisions and chunks, as arrays, and how many are pruned.

Prefill does not depend on the precision of the cache, nor decode on the chunk, so that combinations share
steps: a step is a closed form with a batch and a chunk.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm

import numpy as np
from numpy.typing import NDArray

from meshscope.analysis.utilization import model_flops, n_parameters
from meshscope.cost.planned_collectives import batch_is_split
from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.chips import product_speedup
from meshscope.hardware.topology import Topology
from meshscope.interconnect.profile import ChipProfile
from meshscope.model.model import Model
from meshscope.planner.forms import FormKey, FormTable
from meshscope.plans.caches import device_cache_bytes
from meshscope.plans.checks import cut_block
from meshscope.plans.chunks import DEFAULT_CHUNK, ChunkRule, check_chunks, with_auto_chunk
from meshscope.plans.plan import Plan
from meshscope.plans.program import Engine, Program
from meshscope.plans.stages import default_microbatches
from meshscope.plans.weights import device_weight_bytes
from meshscope.plans.workload import MAX_BATCH, Workload
from meshscope.units import whole_number

MAX_LOCAL_BATCH = 1024  # sequences of one data-parallel rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Sequences over all devices from `least` to `most`.

    They are the data axis of a plan times powers of two, or, with a `step`, each of `least`,
    `least` + `step` and so on that the data axis divides. A single number is that batch alone.
    """

    least: int = 1
    most: int = MAX_BATCH
    step: int | None = None

    def of(self, data_size: int) -> Sequence[int]:
        """The batches of a plan with this data axis, smallest first."""
        if self.least == self.most:
            return () if self.least % data_size else (self.least,)
        if self.step is not None:
            firsts = range(self.least, self.most + 1, self.step)[:data_size]
            first = next((n for n in firsts if n % data_size == 0), self.most + 1)
            return range(first, self.most + 1, lcm(self.step, data_size))
        powers = (1 << power for power in range(MAX_LOCAL_BATCH.bit_length()))
        return tuple(data_size * n for n in powers if self.least <= data_size * n <= self.most)


def parse_batches(text: str | int | None) -> Batches:
    """The batches of `--batch 64`, `8:256` or `8:256:8`; all for None. SpecError for anything else."""
    if text is None:
        return Batches()
    least, separator, rest = str(text).partition(":")
    most, has_step, step = rest.partition(":")
    try:
        first = whole_number(least or "1" if separator else least)
        last = whole_number(most or str(MAX_BATCH)) if separator else first
        every = whole_number(step) if has_step else None
    except ValueError as error:
        raise SpecError(
            f"--batch '{text}' is neither a number nor a range. Use for example 64, 8:256 or 8:256:8."
        ) from error
    if not 1 <= first <= last <= MAX_BATCH:
        raise SpecError(
            f"--batch '{text}' is empty or out of range. Use sizes from 1 to {MAX_BATCH:,}, the smaller first."
        )
    if every is not None and every < 1:
        raise SpecError(f"--batch '{text}': a step of {every} is too small. Use at least 1.")
    return Batches(least=first, most=last, step=every)


BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

CHUNK_LIMITS = (DEFAULT_CHUNK, DEFAULT_CHUNK // 4)  # the default, and that of vLLM on v6e
WHOLE = 0  # stands for prefill of the whole batch at once in arrays of chunks
TOO_LARGE = "the weights and one batch exceed the memory of a device"
NO_BATCH = "the data axis divides no batch of --batch"
NO_CHUNK = "prefill cannot run in chunks of --prefill-chunk"
EXCEEDS = "weights and cache exceed the memory of a device"
CUT_SCALES = "an axis cuts the blocks of weights that share a scale"
OTHER_CHUNK = "the chunk is that of another combination, or the plan does not support it"


@dataclass(frozen=True, kw_only=True)  # without slots, so that it keeps what it derives
class SearchSpace:
    """What a search varies: the plans, batches and precisions for prompts and outputs of one length."""

    model: Model
    topology: Topology
    workload: Workload  # prompt, output and activations
    batches: Batches
    weight_dtypes: tuple[str, ...]
    cache_dtypes: tuple[str, ...]
    chunks: tuple[int | ChunkRule, ...] = (ChunkRule.AUTO,)  # of prefill
    program: Program = field(default_factory=Program)
    profile: ChipProfile | None = None
    n_first_layers: int | None = None  # of a truncated model

    @property
    def chunk_rules(self) -> tuple[tuple[int | ChunkRule, int], ...]:
        """The chunks to try, each with a limit in tokens, which AUTO has two of.

        For prompts that cp splits, the second one of AUTO stands for whole prompts.
        """
        return tuple(
            (chunk, limit)
            for chunk in self.chunks
            for limit in (CHUNK_LIMITS if chunk is ChunkRule.AUTO else CHUNK_LIMITS[:1])
        )

    @cached_property
    def least_s(self) -> tuple[float, float]:
        """Seconds that prefill and a decode step take at least, in any plan: all chips at their peak rates.

        The smallest batch has its prompts multiplied with the active weights, and the weights that one token
        needs, in the narrowest format, are read once. Without attention, communication and overheads.
        """
        chip, n_chips = self.topology.chip, self.topology.n_chips
        if (
            chip.bf16_flops_per_s is None
            or chip.hbm_bytes_per_s is None
            or self.profile is not None
        ):
            return (0.0, 0.0)
        one, two = (
            model_flops(self.model, Workload(prompt=n, output=2), Phase.PREFILL) for n in (1, 2)
        )
        n_total, n_active, n_embedding = n_parameters(self.model)
        speedup = max(product_speedup(dtype, chip) for dtype in self.weight_dtypes)
        flops_s = (two - one) * self.batches.least * self.workload.prompt
        flops_s /= chip.bf16_flops_per_s * speedup * n_chips
        weight_bytes = min(device_weight_bytes(self.model, Plan(), d) for d in self.weight_dtypes)
        # Embeddings have two bytes in every format, or fewer, and are not read as a whole.
        read_bytes = max(0, weight_bytes - 2 * n_embedding) * (n_active - n_embedding)
        read_s = read_bytes / (n_total - n_embedding) / (chip.hbm_bytes_per_s * n_chips)
        return max(flops_s, read_s), read_s

    def n_combinations(self, plan: Plan) -> int:
        """Combinations of a plan with every batch, precision and chunk, before any check."""
        n_dtypes = len(self.weight_dtypes) * len(self.cache_dtypes)
        n_batches = len(self.batches.of(plan.data_size))
        return n_batches * n_dtypes * len(self.chunk_rules)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Combinations:
    """[n] combinations of one plan; dtypes are positions in the space, `prefill` and `decode` in the steps."""

    weight_dtype: IntArray
    cache_dtype: IntArray
    batch: IntArray
    chunk: IntArray  # WHOLE without chunks
    prefill: IntArray
    decode: IntArray


@dataclass(slots=True, kw_only=True)
class StepRows:
    """The steps to evaluate, each once: a form with a batch and a chunk."""

    form: list[IntArray] = field(default_factory=list[IntArray])
    batch: list[IntArray] = field(default_factory=list[IntArray])
    chunk: list[IntArray] = field(default_factory=list[IntArray])
    n_rows: int = 0

    def add(self, form: IntArray, batch: IntArray, chunk: IntArray) -> int:
        """Appends steps; returns the position of the first."""
        first = self.n_rows
        self.form.append(form)
        self.batch.append(batch)
        self.chunk.append(chunk)
        self.n_rows += len(form)
        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Combiner:
    """Combines plans of a space; `pruned` counts combinations by the reason that leaves them out."""

    space: SearchSpace
    pruned: Counter[str] = field(default_factory=Counter[str])
    _chunks: dict[tuple[int, bool, int, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[int, bool, int, int], tuple[int, ...]]
    )

    def combinations(self, plan: Plan, table: FormTable, steps: StepRows) -> Combinations | None:
        """The combinations whose weights and cache fit, with their forms and steps; None without any."""
        space, n_chunks = self.space, len(self.space.chunk_rules)
        batches = np.array(space.batches.of(plan.data_size), dtype=np.int64)
        chunks = [self.chunks(plan, int(batch)) for batch in batches]
        # One row for each batch with each of its chunks.
        row_batch = np.repeat(np.arange(len(batches)), [len(of_batch) for of_batch in chunks])
        row_chunk = np.array([chunk for of_batch in chunks for chunk in of_batch], dtype=np.int64)
        cache_bytes = np.array([self._cache_bytes(plan, dtype) for dtype in space.cache_dtypes])
        n_local = batches // plan.data_size
        used_bytes = cache_bytes[:, None] * n_local  # [cache dtype, batch]
        n_microbatches = np.array([default_microbatches(int(n), plan.pp) for n in n_local])
        is_split = np.array([batch_is_split(plan, int(n)) for n in n_local], dtype=np.bool_)
        parts: list[Combinations] = []
        for at, dtype in enumerate(space.weight_dtypes):
            n_counted = len(batches) * len(cache_bytes) * n_chunks
            if cut_block(plan, space.model, dtype) is not None:
                self.pruned[CUT_SCALES] += n_counted
                continue
            n_rows = len(row_batch) * len(cache_bytes)
            self.pruned[OTHER_CHUNK] += n_counted - n_rows
            fits = self._fits(used_bytes + device_weight_bytes(space.model, plan, dtype))
            n_fitting = int(fits[:, row_batch].sum())
            self.pruned[EXCEEDS] += n_rows - n_fitting
            if n_fitting:
                rows = _Rows(batches=batches, of_batch=row_batch, chunk=row_chunk, fits=fits)
                forms = _Forms(
                    space=space,
                    plan=plan,
                    weight_dtype=dtype,
                    table=table,
                    n_microbatches=n_microbatches,
                    is_split=is_split,
                )
                parts.append(_of_weights(rows, at, forms, steps))
        return _joined(parts) if parts else None

    def _cache_bytes(self, plan: Plan, dtype: str) -> int:
        """Bytes of cache on a device for one sequence of each data-parallel rank."""
        one = replace(self.space.workload, batch=plan.data_size, cache_dtype=dtype)
        return device_cache_bytes(self.space.model, plan, one)

    def _fits(self, used_bytes: IntArray) -> BoolArray:
        hbm_bytes = self.space.topology.chip.device_hbm_bytes
        return (
            np.full(used_bytes.shape, fill_value=True)
            if hbm_bytes is None
            else used_bytes <= hbm_bytes
        )

    def why_none(self, plan: Plan) -> str:
        """Why a plan has no combinations."""
        batches = self.space.batches.of(plan.data_size)
        if not batches:
            return NO_BATCH
        return TOO_LARGE if any(self.chunks(plan, batch) for batch in batches) else NO_CHUNK

    def chunks(self, plan: Plan, batch: int) -> tuple[int, ...]:
        """The chunks of prefill to try, each once; none if the plan supports none of those asked for."""
        n_local = batch // plan.data_size
        key = (n_local, plan.pp == 1, plan.cp, plan.tp if plan.sp else 1)
        if key not in self._chunks:
            workload = replace(self.space.workload, batch=batch)
            sizes = (self._chunk(plan, workload, *rule) for rule in self.space.chunk_rules)
            self._chunks[key] = tuple(dict.fromkeys(size for size in sizes if size is not None))
        return self._chunks[key]

    def _chunk(
        self, plan: Plan, workload: Workload, rule: int | ChunkRule, limit: int
    ) -> int | None:
        """The chunk of a rule; None if the plan does not support it."""
        parts = (self.space.program, Engine.MESHSCOPE)
        if rule is ChunkRule.OFF:
            return WHOLE
        if rule is ChunkRule.AUTO and plan.cp > 1 and limit != CHUNK_LIMITS[0]:
            return WHOLE
        if rule is ChunkRule.AUTO:
            chosen = with_auto_chunk(self.space.model, plan, workload, *parts, limit=limit)
            return chosen.prefill_chunk or WHOLE
        try:
            check_chunks(self.space.model, plan, replace(workload, prefill_chunk=rule), *parts)
        except SpecError:
            return None
        return rule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Forms:
    """The forms of a plan with one precision of the weights."""

    space: SearchSpace
    plan: Plan
    weight_dtype: str
    table: FormTable
    n_microbatches: IntArray  # [batch] of prefill
    is_split: BoolArray  # [batch] whether tp divides a decode step

    def prefill(self, batches: IntArray, used: BoolArray, row_chunk: IntArray) -> IntArray:
        """[row, batch] the position of the form of a chunk and each used batch; equal ones are shared.

        Chunks of prompts that cp splits have forms of their own.
        """
        is_cut = (self.plan.cp > 1) & (row_chunk < self.space.workload.prompt)
        cut, of_row = np.unique(np.where(is_cut, row_chunk, WHOLE), return_inverse=True)
        kinds, dtype = self.n_microbatches[used], self.space.workload.activation_dtype
        forms = [
            _spread(used, self._of(Phase.PREFILL, batches[used], kinds, dtype, int(chunk) or None))
            for chunk in cut
        ]
        return np.array(forms)[of_row]

    def decode(self, batches: IntArray, used: BoolArray, cache_dtype: str) -> IntArray:
        """[used batch] the position of the form of each; equal ones are shared."""
        return self._of(Phase.DECODE, batches[used], self.is_split[used], cache_dtype)

    def _of(
        self,
        phase: Phase,
        batches: IntArray,
        kinds: IntArray | BoolArray,
        cache_dtype: str,
        chunk: int | None = None,
    ) -> IntArray:
        each, first, of_batch = np.unique(kinds, return_index=True, return_inverse=True)
        is_prefill = phase is Phase.PREFILL
        forms = [
            self.table.index(
                FormKey(
                    plan=self.plan,
                    phase=phase,
                    weight_dtype=self.weight_dtype,
                    cache_dtype=cache_dtype,
                    n_microbatches=int(kind) if is_prefill else 1,
                    is_split=not is_prefill and bool(kind),
                    chunk=chunk,
                ),
                int(batches[at]),
            )
            for kind, at in zip(each, first, strict=True)
        ]
        return np.array(forms, dtype=np.int64)[of_batch]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Each batch with each of its chunks, and which precisions of the cache fit beside the weights."""

    batches: IntArray  # [batch]
    of_batch: IntArray  # [row] the position of its batch
    chunk: IntArray  # [row]
    fits: BoolArray  # [cache dtype, batch]


def _of_weights(rows: _Rows, weight_dtype: int, forms: _Forms, steps: StepRows) -> Combinations:
    """The combinations that fit with one precision of the weights, by batch, cache and chunk."""
    fits_any = np.logical_or.reduce(rows.fits, axis=0)  # [batch]
    used = fits_any[rows.of_batch]  # [row]
    row_batch, row_chunk = rows.of_batch[used], rows.chunk[used]
    prefill_form = forms.prefill(rows.batches, fits_any, row_chunk)
    first = steps.add(
        prefill_form[np.arange(len(row_batch)), row_batch], rows.batches[row_batch], row_chunk
    )
    at_row, at_cache, decode = list[IntArray](), list[IntArray](), list[IntArray]()
    for at, dtype in enumerate(forms.space.cache_dtypes):
        fits = rows.fits[at]
        batches = rows.batches[fits]
        form = forms.decode(rows.batches, fits, dtype)
        of_batch = _spread(fits, np.arange(len(batches)) + steps.add(form, batches, 0 * batches))
        (of_cache,) = np.nonzero(fits[row_batch])
        at_row.append(of_cache)
        at_cache.append(np.full(len(of_cache), at))
        decode.append(of_batch[row_batch[of_cache]])
    row, cache = np.concatenate(at_row), np.concatenate(at_cache)
    order = np.lexsort((row, cache, row_batch[row]))
    row, cache = row[order], cache[order]
    return Combinations(
        weight_dtype=np.full(len(row), weight_dtype),
        cache_dtype=cache,
        batch=rows.batches[row_batch[row]],
        chunk=row_chunk[row],
        prefill=first + row,
        decode=np.concatenate(decode)[order],
    )


def _spread(mask: BoolArray, values: IntArray) -> IntArray:
    """The values at the marked positions of an array; -1 elsewhere."""
    spread = np.full(len(mask), -1, dtype=np.int64)
    spread[mask] = values
    return spread


def _joined(parts: list[Combinations]) -> Combinations:
    """The combinations of several precisions of the weights, one after the other."""

    def column(name: str) -> IntArray:
        return np.concatenate([getattr(part, name) for part in parts])

    return Combinations(**{name: column(name) for name in Combinations.__dataclass_fields__})
