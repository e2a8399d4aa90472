"""Every candidate of a search as columns: plan, batch, precision and chunk, with times.

Plans are evaluated group by group, so that forms and steps of a group are all that is in memory beside
the columns.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from meshscope.cost.closed_form import NO_LIMIT, PlanForm, closed_steps, plan_batch
from meshscope.errors import SpecError
from meshscope.planner.combinations import (
    WHOLE,
    Combinations,
    Combiner,
    SearchSpace,
    StepRows,
)
from meshscope.planner.forms import FormTable
from meshscope.planner.progress import SearchProgress
from meshscope.planner.space import PlanSpace
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import FitState, Memory
from meshscope.plans.plan import Plan
from meshscope.plans.workload import Workload
from meshscope.prediction.memory import predicted_memory

FloatArray = NDArray[np.float64]
IntColumn = NDArray[np.signedinteger]

# Types of the columns: millions of candidates take 30 bytes each.
_INT_TYPES: Mapping[str, type[np.signedinteger]] = {
    "plan": np.int32,
    "weight_dtype": np.int8,
    "cache_dtype": np.int8,
    "batch": np.int32,
    "chunk": np.int32,
}

BLOCK = 4096  # steps of one evaluation
GROUP_STEPS, GROUP_FORMS = 1 << 16, 2048  # of plans that are evaluated together
MAX_COMBINATIONS = 20_000_000  # about 3 GB while they are ranked


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, so that it keeps what it derives
class Grid:
    """[n] the candidates whose weights and cache fit, with seconds of prefill and of a decode step.

    `plan` is a position in `plans`; dtypes are positions in those of the space.
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
    n_combinations: int  # before any check, of the plans that divide model and prompt
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
    def _most_batch(self) -> Callable[[int, int, int, int], int]:
        """The largest batch that fits with a plan, the precisions and a chunk; 0 without one.

        A batch needs no less memory than a smaller one.
        """

        def most(plan: int, weight_dtype: int, cache_dtype: int, chunk: int) -> int:
            def exceeds(batch: int) -> bool:
                workload = self._workload(batch, weight_dtype, cache_dtype, chunk)
                memory = predicted_memory(self._experiment(plan, workload))
                return memory.fit not in {FitState.YES, FitState.UNKNOWN}

            batches = self.space.batches.of(self.plans[plan].data_size)
            n_fitting = bisect_left(batches, x=True, key=exceeds)
            return batches[n_fitting - 1] if n_fitting else 0

        return cache(most)

    def fits(self, at: int) -> bool:
        """Whether the high end of the estimated memory fits, or its temporaries are unknown."""
        keys = (self.plan, self.weight_dtype, self.cache_dtype, self.chunk)
        return int(self.batch[at]) <= self._most_batch(*(int(column[at]) for column in keys))

    def plan_at(self, at: int) -> Plan:
        """The plan of a candidate."""
        return self.plans[self.plan[at]]

    def experiment(self, at: int) -> Experiment:
        """The experiment of a candidate."""
        columns = (self.batch, self.weight_dtype, self.cache_dtype, self.chunk)
        workload = self._workload(*(int(column[at]) for column in columns))
        return self._experiment(int(self.plan[at]), workload)

    def _workload(self, batch: int, weight_dtype: int, cache_dtype: int, chunk: int) -> Workload:
        return replace(
            self.space.workload,
            batch=batch,
            weight_dtype=self.space.weight_dtypes[weight_dtype],
            cache_dtype=self.space.cache_dtypes[cache_dtype],
            prefill_chunk=None if chunk == WHOLE else chunk,
        )

    def _experiment(self, plan: int, workload: Workload) -> Experiment:
        return Experiment(
            model=self.space.model,
            plan=self.plans[plan],
            topology=self.space.topology,
            workload=workload,
            program=self.space.program,
        )


def n_combinations(space: SearchSpace, plans: PlanSpace) -> int:
    """Combinations of the plans with batches, precisions and chunks; SpecError for too many."""
    n = sum(map(space.n_combinations, plans.plans))
    if n > MAX_COMBINATIONS:
        raise SpecError(
            f"the search on {space.topology.name} has {n:,} combinations of {len(plans.plans):,} plans with "
            f"batch, precision and chunk, and ranks at most {MAX_COMBINATIONS:,}. Narrow --batch, or name fewer "
            "dtypes and chunks."
        )
    return n


def grid_of(space: SearchSpace, plans: PlanSpace, progress: SearchProgress | None = None) -> Grid:
    """All candidates of the plans."""
    n_counted, refused = n_combinations(space, plans), Counter(plans.n_refused)
    progress = progress or SearchProgress(None)
    progress.counted(space.topology.name, len(plans.plans), n_counted)
    combiner, columns, group = Combiner(space=space), _Columns(), _Group(space)
    for at, plan in enumerate(plans.plans):
        of_plan = combiner.combinations(plan, group.table, group.steps)
        if of_plan is None:
            refused[combiner.why_none(plan)] += 1
        else:
            group.add(at, of_plan)
        progress.add(space.n_combinations(plan))
        if group.is_full:
            group.evaluate_into(columns)
            group = _Group(space)
    group.evaluate_into(columns)
    return Grid(
        space=space,
        plans=plans.plans,
        plan=columns.ints("plan"),
        weight_dtype=columns.ints("weight_dtype"),
        cache_dtype=columns.ints("cache_dtype"),
        batch=columns.ints("batch"),
        chunk=columns.ints("chunk"),
        ttft_s=columns.seconds("ttft_s"),
        tpot_s=columns.seconds("tpot_s"),
        n_combinations=n_counted,
        n_pruned=dict(combiner.pruned),
        n_refused=dict(refused),
    )


class _Columns:
    """The columns of a grid, group by group, in narrow types."""

    def __init__(self) -> None:
        self._ints: dict[str, list[IntColumn]] = {name: [] for name in _INT_TYPES}
        self._seconds: dict[str, list[FloatArray]] = {"ttft_s": [], "tpot_s": []}

    def add(
        self, plan: int, of_plan: Combinations, *, ttft_s: FloatArray, tpot_s: FloatArray
    ) -> None:
        """Appends the combinations of a plan with their seconds."""
        self._ints["plan"].append(np.full(len(of_plan.batch), plan, _INT_TYPES["plan"]))
        for name in ("weight_dtype", "cache_dtype", "batch", "chunk"):
            self._ints[name].append(getattr(of_plan, name).astype(_INT_TYPES[name]))
        self._seconds["ttft_s"].append(ttft_s)
        self._seconds["tpot_s"].append(tpot_s)

    def ints(self, name: str) -> IntColumn:
        """The whole column; its parts are dropped."""
        return np.concatenate([np.zeros(0, _INT_TYPES[name]), *self._ints.pop(name)])

    def seconds(self, name: str) -> FloatArray:
        """The whole column; its parts are dropped."""
        return np.concatenate([np.zeros(0), *self._seconds.pop(name)])


class _Group:
    """Plans that are evaluated together, with their forms and steps."""

    def __init__(self, space: SearchSpace) -> None:
        self.table = FormTable(
            model=space.model,
            topology=space.topology,
            workload=space.workload,
            program=space.program,
            profile=space.profile,
        )
        self.steps = StepRows()
        self._workload = space.workload
        self._combinations: list[tuple[int, Combinations]] = []

    @property
    def is_full(self) -> bool:
        return self.steps.n_rows >= GROUP_STEPS or len(self.table.forms) >= GROUP_FORMS

    def add(self, plan: int, of_plan: Combinations) -> None:
        self._combinations.append((plan, of_plan))

    def evaluate_into(self, columns: _Columns) -> None:
        """Adds the candidates with their seconds to the columns."""
        if not self._combinations:
            return
        seconds = _seconds(self.table.forms, self.steps, self._workload)
        for plan, of_plan in self._combinations:
            columns.add(
                plan, of_plan, ttft_s=seconds[of_plan.prefill], tpot_s=seconds[of_plan.decode]
            )


def _seconds(forms: Sequence[PlanForm], steps: StepRows, workload: Workload) -> FloatArray:
    """[n] seconds of each step."""
    plans = plan_batch(forms)
    at, batch, chunk = (np.concatenate(rows) for rows in (steps.form, steps.batch, steps.chunk))
    limit = np.where(chunk == WHOLE, NO_LIMIT, chunk)
    lengths = {name: float(getattr(workload, name)) for name in ("prompt", "output")}
    blocks = (slice(first, first + BLOCK) for first in range(0, len(at), BLOCK))
    return np.concatenate(
        [
            closed_steps(
                plans,
                at[cut],
                batch=batch[cut].astype(float),
                chunk=limit[cut],
                **{name: np.full(len(at[cut]), size) for name, size in lengths.items()},
            ).step_s
            for cut in blocks
        ]
    )
