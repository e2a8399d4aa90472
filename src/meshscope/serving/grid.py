"""Every candidate of a search as columns: plan, batch, precision and chunk, with times.

Prefill does not depend on the precision of the cache, nor decode on the chunk, so candidates share steps: a
step is a closed form with a batch and a chunk. Plans are evaluated group by group, so memory holds only the
forms and steps of one group besides the columns.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from meshscope.cost.closed_form import (
    NO_LIMIT,
    PlanForm,
    closed_steps,
    fields_of_weights,
    plan_batch,
    plan_form,
)
from meshscope.cost.collective_times import CollectiveCost, batch_is_split, with_weights_of
from meshscope.cost.features import Feature, plan_costs, served_experts
from meshscope.cost.memory import predicted_memory
from meshscope.errors import RunFailedError, SpecError
from meshscope.events.enums import Phase
from meshscope.plans.caches import device_cache_bytes
from meshscope.plans.checks import cut_block
from meshscope.plans.chunks import ChunkRule, check_chunks, with_auto_chunk
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import FitState, Memory
from meshscope.plans.plan import Plan
from meshscope.plans.program import Engine
from meshscope.plans.stages import default_microbatches
from meshscope.plans.weights import device_weight_bytes
from meshscope.plans.workload import Workload
from meshscope.serialize import from_plain, to_plain
from meshscope.serving.space import CHUNK_LIMITS, SearchSpace
from meshscope.store.folder import scratch_folder
from meshscope.workers import Progress, Worker, WorkerTask, n_available_cores

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
IntColumn = NDArray[np.signedinteger]

# Types of the columns: millions of candidates take 30 bytes each.
_TYPES: Mapping[str, type[np.generic]] = {
    "plan": np.int32,
    "weight_dtype": np.int8,
    "cache_dtype": np.int8,
    "batch": np.int32,
    "chunk": np.int32,
    "ttft_s": np.float64,
    "tpot_s": np.float64,
}

WHOLE = 0  # stands for prefill of the whole batch at once in arrays of chunks
BLOCK = 4096  # steps of one evaluation
GROUP_STEPS, GROUP_FORMS = 1 << 16, 2048  # of plans that are evaluated together
LARGE = 100_000  # combinations that are announced before they are predicted
SHARED = 20_000  # combinations that take longer than the start of a second process
REPORT_S = 5.0  # between two reports

TOO_LARGE = "the weights and one batch exceed the memory of a device"
NO_BATCH = "the data axis divides no batch of --batch"
NO_CHUNK = "prefill cannot run in chunks of --prefill-chunk"
EXCEEDS = "weights and cache exceed the memory of a device"
CUT_SCALES = "an axis cuts the blocks of weights that share a scale"
OTHER_CHUNK = "the chunk belongs to another combination, or the plan does not support it"


_SHARE = WorkerTask(
    process="the search",
    activity="predicting plans",
    rejection="the search failed",
    memory_remedy="Narrow --batch, or name fewer dtypes and chunks.",
    crash_remedy="Run the command again.",
    error=RunFailedError,
)


class SearchProgress:
    """Reports a large search, and one of more than some seconds, to a callback.

    With one search, the time left is estimated from the speed so far. With several slices, or `n_searches` of each, it
    is unknown: the search may end at any slice, and a combination takes longer on a larger one.
    """

    def __init__(
        self,
        callback: Progress | None,
        *,
        n_slices: int = 1,
        n_searches: int = 1,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._callback, self._n_slices, self._clock = callback, n_slices, clock
        self._is_single = n_slices * n_searches == 1
        self._n_all = self._n_done = 0
        self._slices: list[str] = []  # so far
        self._started_s = self._reported_s = clock()
        self._is_shown = False

    def counted(self, topology: str, n_plans: int, n_combinations: int) -> None:
        """Takes the size of the search on one slice."""
        self._n_all, self._n_done = n_combinations, 0
        if topology not in self._slices:
            self._slices.append(topology)
        if n_combinations >= LARGE:
            self._report(f"{n_plans:,} plans and {n_combinations:,} combinations on {topology}")

    def add(self, n_combinations: int) -> None:
        """Takes the number of combinations that were predicted or pruned."""
        self._n_done += n_combinations
        now_s = self._clock()
        if self._callback is None or now_s - self._reported_s < REPORT_S:
            return
        step, left_s = f"{self._n_done:,} of {self._n_all:,} combinations", None
        if self._is_single:
            left_frac = (self._n_all - self._n_done) / max(self._n_done, 1)
            left_s = (now_s - self._started_s) * left_frac
        else:
            step += f" on {self._slices[-1]}, slice {len(self._slices)} of {self._n_slices}"
        self._report(step, left_s)
        self._reported_s = now_s

    def done(self) -> None:
        """Ends the report, if there was one."""
        if self._is_shown:
            self._report("done")

    def _report(self, step: str, left_s: float | None = None) -> None:
        if self._callback is not None:
            self._is_shown = True
            self._callback("search", step, left_s)


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, so that it keeps what it derives
class Grid:
    """[n] the candidates whose weights and cache fit, with seconds of prefill and of a decode step.

    `plan` is a position in `plans`; dtypes are positions in the dtypes of the space.
    """

    space: SearchSpace
    plans: tuple[Plan, ...]
    plan: IntColumn
    weight_dtype: IntColumn
    cache_dtype: IntColumn
    batch: IntColumn
    chunk: IntColumn  # WHOLE without chunks
    ttft_s: FloatArray
    tpot_s: FloatArray
    n_pruned: Mapping[str, int]  # combinations, by reason
    n_refused: Mapping[str, int]  # plans without any candidate, by reason

    def __len__(self) -> int:
        """The number of candidates."""
        return len(self.plan)

    @cached_property
    def e2e_s(self) -> FloatArray:
        """[n] seconds of a request: prefill and all decode steps."""
        return self.ttft_s + self.space.workload.n_decode_steps * self.tpot_s

    @cached_property
    def tokens_per_s_per_chip(self) -> FloatArray:
        """[n] output tokens of a batch of requests over their seconds and the chips."""
        n_tokens = self.batch * float(self.space.workload.output)
        return n_tokens / (self.e2e_s * self.space.topology.n_chips)

    @cached_property
    def memory(self) -> Callable[[int], Memory]:
        """The predicted memory of a candidate by its position, computed once."""
        return cache(lambda at: predicted_memory(self.experiment(at)))

    @cached_property
    def _limits(self) -> dict[tuple[int, ...], tuple[int, float]]:
        """The largest batch known to fit, and the smallest known not to, of plan, precisions and chunk."""
        return {}

    def fits(self, at: int) -> bool:
        """Whether the high end of the estimated memory fits, or its temporaries are unknown.

        A batch needs no less memory than a smaller one.
        """
        columns = (self.plan, self.weight_dtype, self.cache_dtype, self.chunk)
        key, batch = tuple(int(column[at]) for column in columns), int(self.batch[at])
        most, least = self._limits.get(key, (0, inf))
        if most < batch < least:
            experiment = self.experiment(at)

            def exceeds(n: int) -> bool:
                one = replace(experiment, workload=replace(experiment.workload, batch=n))
                return predicted_memory(one).fit not in {FitState.YES, FitState.UNKNOWN}

            if self.memory(at).fit in {FitState.YES, FitState.UNKNOWN}:
                most = batch
            else:
                between = self.space.batches.of(experiment.plan.data_size)
                between = between[bisect_right(between, most) : bisect_left(between, batch)]
                n_fitting = bisect_left(between, x=True, key=exceeds)
                most, least = (most, *between)[n_fitting], (*between, batch)[n_fitting]
            self._limits[key] = most, least
        return batch <= most

    def experiment(self, at: int) -> Experiment:
        """The experiment of a candidate."""
        columns = (self.batch, self.weight_dtype, self.cache_dtype, self.chunk)
        workload = self._workload(*(int(column[at]) for column in columns))
        return self.space.experiment(self.plans[self.plan[at]], workload)

    def _workload(self, batch: int, weight_dtype: int, cache_dtype: int, chunk: int) -> Workload:
        return replace(
            self.space.workload,
            batch=batch,
            weight_dtype=self.space.weight_dtypes[weight_dtype],
            cache_dtype=self.space.cache_dtypes[cache_dtype],
            prefill_chunk=None if chunk == WHOLE else chunk,
        )


def grid_of(
    space: SearchSpace,
    progress: SearchProgress | None = None,
    second: "SecondProcess | None" = None,
) -> Grid:
    """All candidates of the legal plans; two cores take every other plan of a large search.

    Searches of several slices share a `second` process, and with it what their plans have in common.
    """
    plans, progress = space.legal.plans, progress or SearchProgress(None)
    progress.counted(space.topology.name, len(plans), space.n_combinations)
    is_shared = space.n_combinations >= SHARED and n_available_cores() > 1
    if not is_shared:
        shares = [_share(space, 0, 1, progress)]
    elif second is not None:
        shares = second.shares(space, progress)
    else:
        with SecondProcess() as process:
            shares = process.shares(space, progress)
    columns = {name: np.concatenate([s.columns[name] for s in shares]) for name in _TYPES}
    order = np.argsort(columns["plan"], kind="stable")
    return Grid(
        space=space,
        plans=plans,
        n_pruned=dict(sum((share.pruned for share in shares), Counter[str]())),
        n_refused=dict(sum((s.refused for s in shares), Counter(space.legal.n_refused))),
        **{name: column[order] for name, column in columns.items()},
    )


class SecondProcess(ExitStack):
    """A process for half of the plans of large searches, which the first of them starts."""

    @cached_property
    def _parts(self) -> tuple[Path, Worker, ThreadPoolExecutor]:
        folder = self.enter_context(scratch_folder())
        threads = self.enter_context(ThreadPoolExecutor(1))
        return folder, self.enter_context(Worker(f"{__name__}:write_share", folder)), threads

    def shares(self, space: SearchSpace, progress: SearchProgress) -> list["_Share"]:
        """Half of the plans by this process, and the others by the second one."""
        folder, worker, threads = self._parts
        request = {"space": to_plain(space), "folder": str(folder)}
        other = threads.submit(worker.do, request, _SHARE)
        mine = _share(space, 0, 2, progress)
        counts = {name: Counter(n_each) for name, n_each in other.result().items()}
        columns = {name: np.load(folder / f"{name}.npy") for name in _TYPES}
        return [mine, _Share(columns=columns, **counts)]


def write_share(request: Mapping[str, Any]) -> dict[str, Any]:
    """In the second process: writes the columns of its plans to a folder, and returns the counts."""
    share = _share(from_plain(SearchSpace, request["space"]), 1, 2, SearchProgress(None))
    for name, column in share.columns.items():
        np.save(Path(request["folder"]) / f"{name}.npy", column, allow_pickle=False)
    return {"pruned": dict(share.pruned), "refused": dict(share.refused)}


class _Share(NamedTuple):
    """The columns of some plans, and how many combinations and plans have no candidate, by reason."""

    columns: dict[str, NDArray[Any]]
    pruned: Counter[str]
    refused: Counter[str]


def _share(space: SearchSpace, first: int, step: int, progress: SearchProgress) -> _Share:
    """The candidates of every `step`-th plan; `progress` counts the plans between them, too."""
    plans, group, refused = space.legal.plans, _Group(space), Counter[str]()
    parts: list[Mapping[str, NDArray[Any]]] = []
    for at in range(first, len(plans), step):
        if (reason := group.add(at, plans[at])) is not None:
            refused[reason] += 1
        progress.add(sum(map(space.n_combinations_of, plans[at : at + step])))
        if group.n_steps >= GROUP_STEPS or len(group.forms) >= GROUP_FORMS:
            parts += group.evaluated()
    parts += group.evaluated()
    columns = {
        name: np.concatenate([np.zeros(0, kind), *(part[name] for part in parts)], dtype=kind)
        for name, kind in _TYPES.items()
    }
    return _Share(columns, group.pruned, refused)


class _Group:
    """Plans that are evaluated together: their closed forms, their steps, and their candidates.

    `steps` are [3, n] form, batch and chunk, each once; candidates have the number of the step of either phase.
    `pruned` counts combinations by reason.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.pruned: Counter[str] = Counter()
        self.known_chunks: dict[tuple[int, bool, int, int], tuple[int, ...]] = {}
        self.clear()

    def clear(self) -> None:
        self.forms: list[PlanForm] = []
        self.steps: list[IntArray] = []
        self.n_steps = 0
        self.candidates: list[dict[str, IntArray]] = []

    def add(self, number: int, plan: Plan) -> str | None:
        """Adds the combinations of a plan whose weights and cache fit; the reason why there are none."""
        space = self.space
        batches = np.array(space.batches.of(plan.data_size), dtype=np.int64)
        of_batch = [self._chunks(plan, int(batch)) for batch in batches]
        # A row is a batch with one of its chunks.
        row_batch = np.repeat(np.arange(len(batches)), list(map(len, of_batch)))
        row_chunk = np.array([chunk for each in of_batch for chunk in each], dtype=np.int64)
        n_local = batches // plan.data_size
        fits = self._fits(plan, n_local)  # [weight dtype, cache dtype, batch]
        n_rows, n_caches = len(row_batch), len(space.cache_dtypes)
        n_counted = len(batches) * n_caches * len(space.chunk_rules)
        for at, dtype in enumerate(space.weight_dtypes):
            if cut_block(plan.of_weights, space.model, dtype) is not None:
                fits[at] = False
                self.pruned[CUT_SCALES] += n_counted
            else:
                self.pruned[OTHER_CHUNK] += n_counted - n_rows * n_caches
                self.pruned[EXCEEDS] += n_rows * n_caches - int(fits[at][:, row_batch].sum())
        weight, cache, row = np.nonzero(fits[:, :, row_batch])
        if not len(row):
            return NO_BATCH if not len(batches) else TOO_LARGE if n_rows else NO_CHUNK
        order = np.lexsort((row, cache, row_batch[row], weight))
        weight, cache, row = weight[order], cache[order], row[order]
        at, chunk = row_batch[row], row_chunk[row]
        batch, none = batches[at], np.zeros_like(at)
        microbatches = np.array([default_microbatches(int(n), plan.pp) for n in n_local])
        is_split = np.array([batch_is_split(plan, int(n)) for n in n_local], dtype=np.int64)
        # Chunks of prompts that cp splits have separate forms.
        cut = np.where((plan.cp > 1) & (chunk < space.workload.prompt), chunk, WHOLE)
        prefill, decode = (
            self._add_forms(PlanForms(space, plan, phase), batch, kinds)
            for phase, kinds in (
                (Phase.PREFILL, (weight, none, microbatches[at], cut)),
                (Phase.DECODE, (weight, cache, none + 1, is_split[at])),
            )
        )
        self.candidates.append(
            {
                "plan": np.full(len(row), number),
                "weight_dtype": weight,
                "cache_dtype": cache,
                "batch": batch,
                "chunk": chunk,
                "prefill": self._add_steps(prefill, batch, chunk),
                "decode": self._add_steps(decode, batch, none),
            }
        )
        return None

    def _chunks(self, plan: Plan, batch: int) -> tuple[int, ...]:
        """Each chunk once; none if the plan supports no requested chunk."""
        key = (batch // plan.data_size, plan.pp == 1, plan.cp, plan.tp if plan.sp else 1)
        if key not in self.known_chunks:
            workload = replace(self.space.workload, batch=batch)
            sizes = (self._chunk(plan, workload, *rule) for rule in self.space.chunk_rules)
            self.known_chunks[key] = tuple(dict.fromkeys(n for n in sizes if n is not None))
        return self.known_chunks[key]

    def _chunk(
        self, plan: Plan, workload: Workload, rule: int | ChunkRule, limit: int
    ) -> int | None:
        model, parts = self.space.model, (self.space.program, Engine.MESHSCOPE)
        is_second_of_cp = plan.cp > 1 and limit != CHUNK_LIMITS[0]
        if rule is ChunkRule.OFF or (rule is ChunkRule.AUTO and is_second_of_cp):
            return WHOLE
        if rule is ChunkRule.AUTO:
            auto = with_auto_chunk(model, plan, workload, *parts, limit=limit)
            return auto.prefill_chunk or WHOLE
        try:
            check_chunks(model, plan, replace(workload, prefill_chunk=rule), *parts)
        except SpecError:
            return None
        return rule

    def _fits(self, plan: Plan, n_local: IntArray) -> NDArray[np.bool_]:
        space, hbm_bytes = self.space, self.space.topology.chip.device_hbm_bytes
        weights = [device_weight_bytes(space.model, plan, dtype) for dtype in space.weight_dtypes]
        one = replace(space.workload, batch=plan.data_size)  # a sequence of each rank
        caches = [
            device_cache_bytes(space.model, plan, replace(one, cache_dtype=dtype))
            for dtype in space.cache_dtypes
        ]
        needed = np.add.outer(np.array(weights), np.multiply.outer(np.array(caches), n_local))
        return needed <= (np.inf if hbm_bytes is None else hbm_bytes)

    def _add_forms(self, of: "PlanForms", batch: IntArray, kinds: tuple[IntArray, ...]) -> IntArray:
        first, number = _distinct(*kinds)
        self.forms += [of.form(*row) for row in np.stack((batch, *kinds), 1)[first].tolist()]
        return len(self.forms) - len(first) + number

    def _add_steps(self, *step: IntArray) -> IntArray:
        first, number = _distinct(*step)
        self.steps.append(np.stack(step)[:, first])
        self.n_steps += len(first)
        return self.n_steps - len(first) + number

    def evaluated(self) -> Iterable[Mapping[str, NDArray[Any]]]:
        """The columns of each plan with the seconds of its candidates; the next group begins."""
        if not self.candidates:
            return
        forms, workload = plan_batch(self.forms), self.space.workload
        at, batch, chunk = np.concatenate(self.steps, axis=1)
        limit = np.where(chunk == WHOLE, NO_LIMIT, chunk)
        seconds: list[FloatArray] = []
        for first in range(0, len(at), BLOCK):
            cut = slice(first, first + BLOCK)
            prompt, output = (
                np.full(len(at[cut]), float(n)) for n in (workload.prompt, workload.output)
            )
            sizes = {"batch": batch[cut].astype(float), "prompt": prompt, "output": output}
            seconds.append(closed_steps(forms, at[cut], chunk=limit[cut], **sizes).step_s)
        every_s = np.concatenate(seconds)
        for candidates in self.candidates:
            times = {
                "ttft_s": every_s[candidates.pop("prefill")],
                "tpot_s": every_s[candidates.pop("decode")],
            }
            narrow = {name: part.astype(_TYPES[name]) for name, part in candidates.items()}
            yield narrow | times
        self.clear()


def _distinct(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """The position of the first row of each kind, and the number of the kind of each row [n]."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max()) + 1) + column
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    return first, number


class PlanForms:
    """The closed forms of one phase of a plan, which share what does not depend on batch and precision."""

    def __init__(self, space: SearchSpace, plan: Plan, phase: Phase) -> None:
        self._space, self._plan, self._phase = space, plan, phase
        self._bases: dict[int, PlanForm] = {}
        self._shared: dict[Any, tuple[CollectiveCost, ...]] = {}

    def form(self, batch: int, weight: int, cache: int, n_microbatches: int, kind: int) -> PlanForm:
        """The first form of a kind, or its variant for another precision and number of micro-batches.

        The kind is the chunk of a prompt that cp splits, or in decode whether tp divides the batch.
        """
        space, phase, shared = self._space, self._phase, self._shared
        is_prefill = phase is Phase.PREFILL
        workload = replace(
            space.workload,
            batch=batch,
            prefill_chunk=(kind or None) if is_prefill else None,
            weight_dtype=space.weight_dtypes[weight],
            cache_dtype=space.workload.activation_dtype
            if is_prefill
            else space.cache_dtypes[cache],
        )
        experiment = space.experiment(self._plan, workload)
        # Weights travel only in the gathers of fsdp.
        of_dtype = (kind, workload.weight_dtype if self._plan.fsdp > 1 else None)
        if kind not in self._bases:
            base = self._bases[kind] = plan_form(experiment, phase, profile=space.profile)
            shared[of_dtype] = shared[*of_dtype, 1.0] = base.collectives
            return base
        base, kernels = self._bases[kind], experiment.kernels
        if of_dtype not in shared:
            shared[of_dtype] = with_weights_of(base.collectives, workload)
        n = n_microbatches / base.n_microbatches
        if (*of_dtype, n) not in shared:
            # Collectives after the ticks carry all sequences.
            factors = np.ones(len(Feature))
            factors[[Feature.SEQUENCES, Feature.TOKENS]] = n
            shared[*of_dtype, n] = tuple(
                structs.replace(c, payload=c.payload * factors) if c.n_once and n != 1 else c
                for c in shared[of_dtype]
            )
        return replace(
            base,
            costs=plan_costs(experiment, phase, base.rates, served=served_experts(experiment)),
            collectives=shared[*of_dtype, n],
            n_microbatches=n_microbatches,
            has_kernel=kernels.prefill_attention.kernel is not None,
            reads_static_cache=kernels.decode_attention.kernel is None,
            **fields_of_weights(experiment, phase),
        )
