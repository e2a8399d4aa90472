"""Every candidate of a search as arrays: plan, batch, precision and chunk, with times and bytes.

Prefill does not depend on the precision of the cache, nor decode on the chunk, so that each step is
evaluated once for all candidates that share it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from meshscope.cost.closed_form import NO_LIMIT, PlanForm, closed_steps, plan_batch
from meshscope.cost.planned_collectives import batch_is_split
from meshscope.errors import SpecError
from meshscope.events.enums import REQUEST_PHASES, Phase
from meshscope.interconnect.profile import ChipProfile
from meshscope.planner.batches import Batches
from meshscope.planner.forms import FormKey, FormTable
from meshscope.planner.space import PlanSpace
from meshscope.prediction.memory import predicted_memory
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.model.model import Model
from meshscope.spec.plan.caches import device_cache_bytes
from meshscope.spec.plan.checks import cut_block
from meshscope.spec.plan.chunks import DEFAULT_CHUNK, ChunkRule, check_chunks, with_auto_chunk
from meshscope.spec.plan.memory import Memory
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.stages import default_microbatches
from meshscope.spec.plan.weights import device_weight_bytes
from meshscope.spec.program import Engine, Program
from meshscope.spec.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CHUNK_LIMITS = (DEFAULT_CHUNK, DEFAULT_CHUNK // 4)  # the default, and that of vLLM on v6e
BLOCK = 4096  # steps of one evaluation
TOO_LARGE = "the weights and one batch exceed the memory of a device"
NO_BATCH = "the data axis divides no batch of --batch"
NO_CHUNK = "prefill cannot run in chunks of --prefill-chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What a search varies: the plans, batches and precisions for prompts and outputs of one length."""

    model: Model
    topology: Topology
    workload: Workload  # prompt, output and activations
    batches: Batches
    weight_dtypes: tuple[str, ...]
    cache_dtypes: tuple[str, ...]
    chunk: int | ChunkRule = ChunkRule.AUTO  # of prefill; AUTO tries those up to CHUNK_LIMITS
    program: Program = field(default_factory=Program)
    profile: ChipProfile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One combination, as positions in the arrays of its grid."""

    plan: Plan
    workload: Workload  # with batch, precisions and chunk
    prefill: int
    decode: int


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, so that it keeps what it derives
class Grid:
    """The candidates whose weights and cache fit, with seconds of prefill and of a decode step [n]."""

    space: SearchSpace
    candidates: tuple[Candidate, ...]
    ttft_s: FloatArray
    tpot_s: FloatArray
    n_refused: Mapping[str, int]  # plans without any candidate, by reason

    @cached_property
    def batch(self) -> FloatArray:
        """[n] sequences of the slice."""
        return np.array([c.workload.batch for c in self.candidates], dtype=float)

    @cached_property
    def e2e_s(self) -> FloatArray:
        """[n] seconds of a request: prefill and all decode steps."""
        return self.ttft_s + self.space.workload.n_decode_steps * self.tpot_s

    @cached_property
    def tokens_per_s_per_chip(self) -> FloatArray:
        """[n] output tokens of a batch of requests over their seconds and the chips."""
        n_tokens = self.batch * self.space.workload.output
        return n_tokens / (self.e2e_s * self.space.topology.n_chips)

    @cached_property
    def memory(self) -> Callable[[int], Memory]:
        """The predicted memory of a candidate by its position, computed once."""
        return cache(lambda at: predicted_memory(self.experiment(at)))

    def experiment(self, at: int) -> Experiment:
        """The experiment of a candidate."""
        candidate, space = self.candidates[at], self.space
        return Experiment(
            model=space.model,
            plan=candidate.plan,
            topology=space.topology,
            workload=candidate.workload,
            program=space.program,
        )


@dataclass(slots=True, kw_only=True)
class _Steps:
    """The steps to evaluate: a form with a batch and a chunk, each once."""

    sizes: dict[tuple[int, int, int | None], int] = field(
        default_factory=dict[tuple[int, int, int | None], int]
    )

    def at(self, form: int, batch: int, chunk: int | None) -> int:
        return self.sizes.setdefault((form, batch, chunk), len(self.sizes))

    def seconds(self, forms: Sequence[PlanForm], workload: Workload) -> FloatArray:
        """[n] seconds of each step."""
        if not self.sizes:
            return np.zeros(0)
        plans, rows = plan_batch(forms), list(self.sizes)
        at = np.array([form for form, _, _ in rows])
        batch = np.array([batch for _, batch, _ in rows], dtype=float)
        chunk = np.array([NO_LIMIT if c is None else c for _, _, c in rows], dtype=float)
        lengths = {name: float(getattr(workload, name)) for name in ("prompt", "output")}
        blocks = (slice(first, first + BLOCK) for first in range(0, len(rows), BLOCK))
        return np.concatenate(
            [
                closed_steps(
                    plans,
                    at[cut],
                    batch=batch[cut],
                    chunk=chunk[cut],
                    **{name: np.full(len(at[cut]), size) for name, size in lengths.items()},
                ).step_s
                for cut in blocks
            ]
        )


def grid_of(space: SearchSpace, plans: PlanSpace) -> Grid:
    """All candidates of the plans, evaluated together."""
    table = FormTable(
        model=space.model,
        topology=space.topology,
        workload=space.workload,
        program=space.program,
        profile=space.profile,
    )
    steps, refused = _Steps(), Counter(plans.n_refused)
    candidates: list[Candidate] = []
    for plan in plans.plans:
        batches = space.batches.of(plan.data_size)
        candidates_of_plan = list(_candidates(space, plan, batches, table, steps))
        candidates += candidates_of_plan
        if not candidates_of_plan:
            refused[_why_none(space, plan, batches)] += 1
    seconds = steps.seconds(table.forms, space.workload)
    return Grid(
        space=space,
        candidates=tuple(candidates),
        ttft_s=seconds[[c.prefill for c in candidates]],
        tpot_s=seconds[[c.decode for c in candidates]],
        n_refused=dict(refused),
    )


def _why_none(space: SearchSpace, plan: Plan, batches: Sequence[int]) -> str:
    """Why a plan has no candidates."""
    if not batches:
        return NO_BATCH
    chunks = (_chunks(space, plan, replace(space.workload, batch=batch)) for batch in batches)
    return TOO_LARGE if any(chunks) else NO_CHUNK


def _candidates(
    space: SearchSpace, plan: Plan, batches: Sequence[int], table: FormTable, steps: _Steps
) -> Iterator[Candidate]:
    """The candidates of one plan whose weights and cache fit."""
    hbm_bytes = space.topology.chip.device_hbm_bytes
    one = replace(space.workload, batch=plan.data_size)
    cache = {
        dtype: device_cache_bytes(space.model, plan, replace(one, cache_dtype=dtype))
        for dtype in space.cache_dtypes
    }
    chunks = {batch: _chunks(space, plan, replace(one, batch=batch)) for batch in batches}
    for weight_dtype in space.weight_dtypes:
        if cut_block(plan, space.model, weight_dtype) is not None:
            continue
        weights_bytes = device_weight_bytes(space.model, plan, weight_dtype)
        for batch in batches:
            for cache_dtype in space.cache_dtypes:
                used = weights_bytes + cache[cache_dtype] * (batch // plan.data_size)
                if hbm_bytes is not None and used > hbm_bytes:
                    continue
                workload = replace(
                    one, batch=batch, weight_dtype=weight_dtype, cache_dtype=cache_dtype
                )
                prefill, decode = (
                    table.index(_key(plan, of, workload), batch) for of in REQUEST_PHASES
                )
                for chunk in chunks[batch]:
                    yield Candidate(
                        plan=plan,
                        workload=replace(workload, prefill_chunk=chunk) if chunk else workload,
                        prefill=steps.at(prefill, batch, chunk),
                        decode=steps.at(decode, batch, None),
                    )


def _chunks(space: SearchSpace, plan: Plan, workload: Workload) -> tuple[int | None, ...]:
    """The chunks of prefill to try, each once; none if the plan does not support the one asked for."""
    if space.chunk is ChunkRule.OFF:
        return (None,)
    if not isinstance(space.chunk, ChunkRule):
        chosen = replace(workload, prefill_chunk=space.chunk)
        try:
            check_chunks(space.model, plan, chosen, space.program, Engine.MESHSCOPE)
        except SpecError:
            return ()
        return (space.chunk,)
    chunks = (
        with_auto_chunk(
            space.model, plan, workload, space.program, Engine.MESHSCOPE, limit=limit
        ).prefill_chunk
        for limit in CHUNK_LIMITS
    )
    return tuple(dict.fromkeys(chunks))


def _key(plan: Plan, phase: Phase, workload: Workload) -> FormKey:
    n_local = workload.batch // plan.data_size
    is_prefill = phase is Phase.PREFILL
    return FormKey(
        plan=plan,
        phase=phase,
        weight_dtype=workload.weight_dtype,
        cache_dtype=workload.activation_dtype if is_prefill else workload.cache_dtype,
        n_microbatches=default_microbatches(n_local, plan.pp) if is_prefill else 1,
        is_split=not is_prefill and batch_is_split(plan, n_local),
    )
