"""Every candidate of a search as columns: plan, batch, precision and chunk, with times.

Prefill does not depend on the precision of the cache, nor decode on the chunk, so candidates share steps: a
step is a closed form with a batch and a chunk. Plans are evaluated group by group, so memory holds only the
forms and steps of one group besides the columns.

A search needs few of the times, so it begins with floors, and computes the times of plans whose floors could change
its answer. Prefill takes no less than without collectives. A decode step of a plan with fsdp takes no less than its
gathers of weights, nor than that of the plan with dp of the same sizes, which has its other costs and collectives.
"""

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import groupby, pairwise
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
from meshscope.cost.collective_times import (
    CollectiveCost,
    batch_is_split,
    decode_gathers_s,
    with_weights_of,
)
from meshscope.cost.features import Feature, plan_costs, served_experts
from meshscope.cost.memory import predicted_memory
from meshscope.errors import RunFailedError, SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.interconnect.constants import constants_of
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
from meshscope.serving.objective import pareto_front
from meshscope.serving.space import CHUNK_LIMITS, SearchSpace
from meshscope.store.folder import scratch_folder
from meshscope.workers import Progress, Worker, WorkerTask, n_available_cores

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
IntColumn = NDArray[np.signedinteger]
Floors = Mapping[Phase, bool]  # whether floors will do for the seconds of a phase
Seconds = tuple[IntArray | None, FloatArray]  # numbers of steps, and the least seconds

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
SHARED_PLANS = 8  # that do, of those with floors
N_RANKED = 1000  # combinations of a plan that take longer to rank again than its forms
FLOOR_FRAC = 1 - 1e-9  # part of a computed floor that rounding cannot exceed
EXACT = {Phase.PREFILL: False, Phase.DECODE: False}  # whether floors will do
FLOORS = {Phase.PREFILL: True, Phase.DECODE: True}
SECONDS = {Phase.PREFILL: "ttft_s", Phase.DECODE: "tpot_s"}  # the column of each
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

    `plan` is a position in `plans`, rising; dtypes are positions in the dtypes of the space. The seconds of a phase are
    floors for plans that `is_floor` marks, until `settle` replaces them by what `timed` returns for some plans.
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
    is_floor: Mapping[Phase, NDArray[np.bool_]]  # [plan]
    timed: Callable[[Sequence[int], Phase], FloatArray]

    def __len__(self) -> int:
        """The number of candidates."""
        return len(self.plan)

    def settle(self, rows: IntArray) -> bool:
        """Replaces floors of prefill, else of decode, of the candidates' plans by their times; whether there were any."""
        for phase in (Phase.PREFILL, Phase.DECODE):
            plans = np.unique(self.plan[rows])
            plans = plans[self.is_floor[phase][plans]]
            if len(plans):
                column: FloatArray = getattr(self, SECONDS[phase])
                column[np.isin(self.plan, plans)] = self.timed(plans.tolist(), phase)
                self.is_floor[phase][plans] = False
                return True
        return False

    def has_floor(self, at: int) -> bool:
        """Whether a time of a candidate is a floor."""
        return any(bool(of_plan[self.plan[at]]) for of_plan in self.is_floor.values())

    def front(self, among: NDArray[np.bool_]) -> IntArray:
        """The marked candidates on the Pareto front of TTFT, TPOT and request tokens/s per chip."""
        (at,) = np.nonzero(among)
        while True:
            figures = (self.ttft_s[at], self.tpot_s[at], -self.tokens_per_s_per_chip[at])
            front = at[pareto_front(np.stack(figures, axis=1))]
            # A floor that the times of others beat or equal leaves its candidate off the front.
            if not self.settle(front):
                return front

    @property
    def e2e_s(self) -> FloatArray:
        """[n] seconds of a request: prefill and all decode steps."""
        return self.ttft_s + self.space.workload.n_decode_steps * self.tpot_s

    @property
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
    *,
    has_floors: bool = False,
) -> Grid:
    """All candidates of the legal plans, with times or floors; a `second` process takes half of a large search.

    Searches of several slices share it, and with it what their plans have in common.
    """
    plans, progress = space.legal.plans, progress or SearchProgress(None)
    progress.counted(space.topology.name, len(plans), space.n_combinations)
    is_large = space.n_combinations >= SHARED and n_available_cores() > 1

    def share_of(numbers: Sequence[int], progress: SearchProgress | None, floors: Floors) -> _Share:
        if second is None or not is_large or len(numbers) < SHARED_PLANS:
            shares = [_share(space, numbers, progress, floors)]
        else:
            shares = second.shares(space, numbers, progress, floors)
        columns = {name: np.concatenate([s.columns[name] for s in shares]) for name in _TYPES}
        order = np.argsort(columns["plan"], kind="stable")
        return _Share(
            {name: column[order] for name, column in columns.items()},
            sum((share.pruned for share in shares), Counter[str]()),
            sum((share.refused for share in shares), Counter[str]()),
        )

    def timed(numbers: Sequence[int], phase: Phase) -> FloatArray:
        return share_of(numbers, None, {phase: False}).columns[SECONDS[phase]]

    is_bounded = has_floors and SHARED <= space.n_combinations <= N_RANKED * len(plans)
    floors = FLOORS if is_bounded else EXACT
    share = share_of(range(len(plans)), progress, floors)
    is_floor = {p: np.array([_is_floor(plan, p, floors) for plan in plans]) for p in floors}
    for phase, of_plan in is_floor.items():
        share.columns[SECONDS[phase]][of_plan[share.columns["plan"]]] *= FLOOR_FRAC
    return Grid(
        space=space,
        plans=plans,
        n_pruned=dict(share.pruned),
        n_refused=dict(Counter(space.legal.n_refused) + share.refused),
        is_floor=is_floor,
        timed=timed,
        **share.columns,
    )


class SecondProcess(ExitStack):
    """A process for half of the plans of large searches, which the first of them starts."""

    @cached_property
    def _parts(self) -> tuple[Path, Worker, ThreadPoolExecutor]:
        folder = self.enter_context(scratch_folder())
        threads = self.enter_context(ThreadPoolExecutor(1))
        return folder, self.enter_context(Worker(f"{__name__}:write_share", folder)), threads

    def shares(
        self,
        space: SearchSpace,
        numbers: Sequence[int],
        progress: SearchProgress | None,
        floors: Floors,
    ) -> list["_Share"]:
        """Half of the plans by this process, and the others by the second one; meshes of equal sizes by one of them."""
        folder, worker, threads = self._parts
        halves, plans = ([], list[int]()), space.legal.plans
        for _, block in groupby(numbers, key=lambda n: (plans[n].pp, plans[n].cp, plans[n].tp)):
            min(halves, key=len).extend(block)
        request = {"space": json.dumps(to_plain(space)), "folder": str(folder)}
        other = threads.submit(
            worker.do, request | {"numbers": halves[1], "floors": floors}, _SHARE
        )
        mine = _share(space, halves[0], progress, floors)
        counts = {name: Counter(n_each) for name, n_each in other.result().items()}
        columns = {name: np.load(folder / f"{name}.npy") for name in _TYPES}
        return [mine, _Share(columns=columns, **counts)]


def write_share(request: Mapping[str, Any]) -> dict[str, Any]:
    """In the second process: writes the columns of its plans to a folder, and returns the counts."""
    space, floors = _known_space(request["space"]), request["floors"]
    floors = {Phase(phase): will_do for phase, will_do in floors.items()}
    share = _share(space, request["numbers"], None, floors)
    for name, column in share.columns.items():
        np.save(Path(request["folder"]) / f"{name}.npy", column, allow_pickle=False)
    return {"pruned": dict(share.pruned), "refused": dict(share.refused)}


@lru_cache(maxsize=1)
def _known_space(text: str) -> SearchSpace:
    return from_plain(SearchSpace, json.loads(text))


class _Share(NamedTuple):
    """The columns of some plans, and how many combinations and plans have no candidate, by reason.

    The seconds of a phase that was not asked for are no numbers.
    """

    columns: dict[str, NDArray[Any]]
    pruned: Counter[str]
    refused: Counter[str]


def _share(
    space: SearchSpace, numbers: Sequence[int], progress: SearchProgress | None, floors: Floors
) -> _Share:
    """The candidates of some plans, in rising order; `progress` counts the plans between them, too."""
    plans, group, refused = space.legal.plans, _Group(space, floors), Counter[str]()
    parts: list[Mapping[str, NDArray[Any]]] = []
    for before, at in pairwise((-1, *numbers)):
        if (reason := group.add(at, plans[at])) is not None:
            refused[reason] += 1
        if progress is not None:
            progress.add(sum(map(space.n_combinations_of, plans[before + 1 : at + 1])))
        if group.n_steps >= GROUP_STEPS or len(group.forms) >= GROUP_FORMS:
            parts += group.evaluated()
    parts += group.evaluated()
    columns = {
        name: np.concatenate([np.zeros(0, kind), *(part[name] for part in parts)], dtype=kind)
        for name, kind in _TYPES.items()
    }
    return _Share(columns, group.pruned, refused)


def _is_floor(plan: Plan, phase: Phase, floors: Floors) -> bool:
    """Whether the seconds of a plan's phase are floors; without fsdp, those of decode steps are times."""
    return floors[phase] and (plan.fsdp > 1 or phase is Phase.PREFILL)


def _with_dp(plan: Plan) -> Plan:
    """The plan with dp instead of fsdp."""
    return replace(plan, dp=plan.data_size, fsdp=1) if plan.fsdp > 1 else plan


class _Group:
    """Plans that are evaluated together: their closed forms, their steps, and their candidates.

    `steps` are [3, n] form, batch and chunk, each once; candidates have the number of the step of each phase, if any,
    and seconds that it takes at least.
    `pruned` counts combinations by reason.
    """

    def __init__(self, space: SearchSpace, floors: Floors) -> None:
        self.space, self.floors = space, floors
        self.pruned: Counter[str] = Counter()
        self.known_chunks: dict[tuple[int, bool, int, int], tuple[int, ...]] = {}
        self.clear()

    def clear(self) -> None:
        self.forms: list[PlanForm] = []
        self.forms_of: dict[tuple[Plan, Phase], PlanForms] = {}
        self.steps: list[IntArray] = []
        self.n_steps = 0
        self.candidates: list[tuple[dict[str, IntArray], dict[Phase, Seconds]]] = []

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
        kinds = {
            Phase.PREFILL: (weight, none, microbatches[at], cut),
            Phase.DECODE: (weight, cache, none + 1, is_split[at]),
        }
        steps = {Phase.PREFILL: (batch, chunk), Phase.DECODE: (batch, none)}
        seconds = {p: self._seconds(plan, p, kinds[p], steps[p]) for p in self.floors}
        columns = {"weight_dtype": weight, "cache_dtype": cache, "batch": batch, "chunk": chunk}
        self.candidates.append(({"plan": np.full(len(row), number), **columns}, seconds))
        return None

    def _seconds(
        self, plan: Plan, phase: Phase, kinds: tuple[IntArray, ...], step: tuple[IntArray, ...]
    ) -> Seconds:
        """The numbers of the steps of a plan's candidates with these kinds of forms, batches and chunks; or their floors."""
        is_floor, least_s = _is_floor(plan, phase, self.floors), np.zeros(1)
        key = (_with_dp(plan) if is_floor else plan, phase)
        if is_floor and phase is Phase.DECODE:
            least_s = self._gathers_s(plan)[kinds[0]]
        elif key not in self.forms_of:
            self.forms_of[key] = PlanForms(self.space, *key, has_collectives=not is_floor)
        if key not in self.forms_of:
            return None, least_s
        return self._add_steps(self._add_forms(self.forms_of[key], step[0], kinds), *step), least_s

    def _gathers_s(self, plan: Plan) -> FloatArray:
        """[weight dtype] seconds of a decode step's gathers."""
        space = self.space
        one = space.experiment(plan, replace(space.workload, batch=plan.data_size))
        chip, profile = space.topology.chip, space.profile
        constants = constants_of(chip) if profile is None else profile.constants
        return decode_gathers_s(one, space.weight_dtypes, constants)

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
        places = list[int]()
        for batch_of, *kind in np.stack((batch, *kinds), 1)[first].tolist():
            if (key := tuple(kind)) not in of.places:
                of.places[key] = len(self.forms)
                self.forms.append(of.form(batch_of, *kind))
            places.append(of.places[key])
        return np.array(places)[number]

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
        every = [np.zeros(0)]
        for first in range(0, len(at), BLOCK):
            cut = slice(first, first + BLOCK)
            prompt, output = (
                np.full(len(at[cut]), float(n)) for n in (workload.prompt, workload.output)
            )
            sizes = {"batch": batch[cut].astype(float), "prompt": prompt, "output": output}
            every.append(closed_steps(forms, at[cut], chunk=limit[cut], **sizes).step_s)
        every_s = np.concatenate(every)
        for columns, seconds in self.candidates:
            narrow = {name: part.astype(_TYPES[name]) for name, part in columns.items()}
            times = {name: np.full(len(columns["plan"]), np.nan) for name in SECONDS.values()}
            for phase, (step, least_s) in seconds.items():
                step_s = 0.0 if step is None else every_s[step]
                times[SECONDS[phase]][:] = np.maximum(step_s, least_s)
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

    def __init__(
        self, space: SearchSpace, plan: Plan, phase: Phase, *, has_collectives: bool = True
    ) -> None:
        self._space, self._plan, self._phase = space, plan, phase
        self._has_collectives = has_collectives
        self.places: dict[tuple[int, ...], int] = {}  # of its forms in a group
        self._bases: dict[int, PlanForm] = {}
        self._variants: dict[tuple[int, int, int], PlanForm] = {}
        self._shared: dict[Any, tuple[CollectiveCost, ...]] = {}

    def form(self, batch: int, weight: int, cache: int, n_microbatches: int, kind: int) -> PlanForm:
        """The first form of a kind, or its variant for another precision and number of micro-batches.

        The kind is the chunk of a prompt that cp splits, or in decode whether tp divides the batch.
        """
        shared, of_precision = self._shared, (kind, weight, cache)
        # Weights travel only in the gathers of fsdp.
        of_dtype = (kind, weight if self._plan.fsdp > 1 else None)
        if of_precision not in self._variants:
            self._variants[of_precision] = self._variant(batch, weight, cache, of_dtype)
        variant = self._variants[of_precision]
        n = n_microbatches / variant.n_microbatches
        if n == 1:
            return variant
        if (*of_dtype, n) not in shared:
            # Collectives after the ticks carry all sequences.
            factors = np.ones(len(Feature))
            factors[[Feature.SEQUENCES, Feature.TOKENS]] = n
            shared[*of_dtype, n] = tuple(
                structs.replace(c, payload=c.payload * factors) if c.n_once else c
                for c in variant.collectives
            )
        return replace(variant, collectives=shared[*of_dtype, n], n_microbatches=n_microbatches)

    def _variant(
        self, batch: int, weight: int, cache: int, of_dtype: tuple[int, int | None]
    ) -> PlanForm:
        """The first form of a kind, or one with its collectives and micro-batches at another precision."""
        space, phase, kind = self._space, self._phase, of_dtype[0]
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
        if kind not in self._bases:
            base = self._bases[kind] = plan_form(
                experiment,
                phase,
                profile=space.profile,
                has_collectives=self._has_collectives,
            )
            self._shared[of_dtype] = base.collectives
            return base
        base, kernels = self._bases[kind], experiment.kernels
        if of_dtype not in self._shared:
            self._shared[of_dtype] = with_weights_of(base.collectives, workload)
        return replace(
            base,
            costs=plan_costs(experiment, phase, base.rates, served=served_experts(experiment)),
            collectives=self._shared[of_dtype],
            has_kernel=kernels.prefill_attention.kernel is not None,
            reads_static_cache=kernels.decode_attention.kernel is None,
            **fields_of_weights(experiment, phase),
        )
