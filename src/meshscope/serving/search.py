"""The search for the best plan: legal plans, their candidates, the Pareto front, and the winner."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshscope.analysis.request import RequestCost, are_equal, request_cost
from meshscope.analysis.roofline import why_sentence
from meshscope.cost.closed_form import plan_form
from meshscope.cost.predicted import has_figures, predicted_times, steps_of, wire_bytes
from meshscope.errors import SpecError, read_only
from meshscope.events.enums import Part, Phase
from meshscope.events.step_time import StepTime
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import Memory
from meshscope.serialize import picked
from meshscope.serving.grid import Grid, SearchProgress, SecondProcess, grid_of
from meshscope.serving.objective import Goal, Objective
from meshscope.serving.space import SearchSpace
from meshscope.units import DTYPE_BITS, format_bytes, format_seconds

BoolArray, FloatArray = NDArray[np.bool_], NDArray[np.float64]
N_BEST = 20  # plans beside the front
N_AHEAD = 100  # candidates whose plans get their times together
N_EQUALS = 3  # plans after the winner that may equal it
MIN_GAIN_S = 1e-6  # of an axis or of compute in a comparison of two plans
EXCHANGE = "exchange with experts"  # one cause, whatever axes it is over


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One combination of plan, batch, precision and chunk, with its predicted figures, without intervals."""

    experiment: Experiment
    memory: Memory
    ttft_s: float
    tpot_s: float

    @property
    def e2e_s(self) -> float:
        """Seconds of a request: prefill and all decode steps."""
        return self.ttft_s + self.experiment.workload.n_decode_steps * self.tpot_s

    @property
    def tokens_per_s_per_chip(self) -> float:
        """Output tokens of a batch of requests over prefill and all decode steps."""
        workload, n_chips = self.experiment.workload, self.experiment.topology.n_chips
        return workload.batch * workload.output / (self.e2e_s * n_chips)

    @property
    def decode_tokens_per_s_per_chip(self) -> float:
        """Output tokens of a batch over a decode step."""
        return self.experiment.workload.batch / self.tpot_s / self.experiment.topology.n_chips


@dataclass(frozen=True, slots=True, kw_only=True)
class WonBy:
    """The winner against the best plan with other axes, both with the winner's batch and precision.

    Seconds and bytes are the runner-up's minus the winner's, so positive ones are the winner's gain.
    They are empty, and `sentence` says why, if the runner-up does not take the winner's batch.
    """

    runner_up: Choice
    seconds: Mapping[str, float]
    wire_bytes: Mapping[str, float]
    sentence: str


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """The result of a search; `winner` is None if nothing meets the objective, or nothing fits.

    `n_counted` plans are `n_plans` that divide model and prompt, and the refused ones of `n_refused`, which
    also counts plans without a candidate. `n_combinations` of the former with batch, precision and chunk
    are `n_candidates`, and the pruned ones of `n_pruned`.
    `front` is the Pareto front of TTFT, TPOT and request tokens/s per chip among the choices that meet the
    objective, the best first. `best` are the best choices of the best plans, one of each. The first of `front` and each of `best` have the checkpoint's own format of weights if that equals the
    best (`are_equal`), and `equals` are the others of `best` that equal the winner. If nothing meets the limits,
    `nearest` are the choices of the plans that come closest to them, one of each, and `fastest` says how far each
    latency alone can go.
    """

    space: SearchSpace
    objective: Objective
    n_counted: int
    n_plans: int
    n_combinations: int
    n_candidates: int
    n_meeting: int
    n_refused: Mapping[str, int]
    n_pruned: Mapping[str, int]
    front: tuple[Choice, ...]
    best: tuple[Choice, ...]
    equals: tuple[Choice, ...] = ()
    own_format: Choice | None = None  # the best in the checkpoint's own format, if another one is
    nearest: tuple[Choice, ...] = ()
    fastest: tuple[Choice, ...] = ()  # of any that fits: the least TTFT, and the least TPOT
    won_by: WonBy | None = None
    unquantized: Choice | None = None  # the best with weights and cache as wide as the activations
    times: tuple[StepTime, ...] = ()  # steps of the winner with intervals
    why: Mapping[Phase, str] = field(default_factory=dict[Phase, str])

    @property
    def winner(self) -> Choice | None:
        """The best choice that meets the objective."""
        return self.front[0] if self.front else None

    @property
    def closest(self) -> Choice | None:
        """The choice that comes closest to limits that none meets."""
        return self.nearest[0] if self.nearest else None

    @property
    def is_extrapolated(self) -> bool:
        """Whether the times of the winner leave the range of their measurements."""
        return any(time.is_extrapolated for time in self.times)


def search(
    space: SearchSpace,
    objective: Objective,
    progress: SearchProgress | None = None,
    second: SecondProcess | None = None,
) -> PlanSearch:
    """The best plans of a model on a slice; `progress` gets their number before any is predicted.

    SpecError without published figures of the chip or a profile, and for more combinations than fit in
    memory.
    """
    if not has_figures(space.topology.chip, space.profile):
        raise SpecError(
            f"'{space.topology.name}' has no published peaks, which predicted times need. "
            "Use a TPU or GPU slice, or --profile with a file that 'meshscope calibrate' wrote."
        )
    if space.workload.n_decode_steps == 0:
        raise SpecError("--output 1 has no decode step to plan for. Use at least 2.")
    limit = space.model.max_position
    if limit is not None and space.workload.context > limit:
        raise SpecError(
            f"prompt={space.workload.prompt} and output={space.workload.output} need "
            f"{space.workload.context} positions; {space.model.name} has {limit}. Shorten one of them."
        )
    with nullcontext(second) if second is not None else SecondProcess() as process:
        grid = grid_of(space, progress, process, has_floors=True)
        return ranked(grid, objective)


def ranked(grid: Grid, objective: Objective) -> PlanSearch:
    """The result of the search whose candidates these are."""
    space = grid.space
    ranking = GridRanking(grid=grid, objective=objective)
    meets, every = ranking.meets, np.ones(len(grid), dtype=np.bool_)
    of_plans = ranking.ranked(meets, row_of=lambda i: int(grid.plan[i]))
    best = tuple(map(ranking.own_format, islice(of_plans, N_BEST)))
    front = tuple(ranking.front(meets))
    front = tuple(dict.fromkeys((*map(ranking.own_format, front[:1]), *front)))
    result = PlanSearch(
        space=space,
        objective=objective,
        n_counted=space.legal.n_counted,
        n_plans=len(space.legal.plans),
        n_combinations=space.n_combinations,
        n_candidates=len(grid),
        n_meeting=int(meets.sum()),
        **picked(grid, "n_refused", "n_pruned"),
        front=front,
        best=best,
    )
    if not front:

        def excess() -> FloatArray:
            return objective.excess(grid.ttft_s, grid.tpot_s)

        times_s = (lambda: grid.ttft_s, lambda: grid.tpot_s)
        fastest = [one for s in times_s for one in islice(ranking.ranked(every, s), 1)]
        by_plan = ranking.ranked(every, excess, row_of=lambda i: int(grid.plan[i]))
        nearest = tuple(islice(by_plan, N_BEST))
        is_own = not nearest or ranking.is_own_format(nearest[0])
        stored = None if is_own else ranking.best(ranking.has_own_format, excess)
        return replace(result, nearest=nearest, own_format=stored, fastest=tuple(fastest))
    winner = front[0]
    times = predicted_times(winner.experiment, space.profile)
    dtype = winner.experiment.workload.weight_dtype
    is_own = ranking.is_own_format(winner)
    return replace(
        result,
        equals=tuple(ranking.equals(winner, best)),
        own_format=None if is_own else ranking.best(meets & ranking.has_own_format),
        won_by=ranking.won_by(winner, best),
        unquantized=ranking.unquantized(),
        times=times,
        why={time.phase: why_sentence(time, space.topology.chip, dtype) for time in times},
    )


@dataclass(frozen=True, kw_only=True)  # without slots, so that it keeps what it derives
class GridRanking:
    """The order of the candidates of a grid under an objective."""

    grid: Grid
    objective: Objective

    @cached_property
    def meets(self) -> BoolArray:
        """[n] whether a candidate is within the limits; each that may be has its times."""
        grid, objective = self.grid, self.objective
        while True:
            meets = objective.meets(grid.ttft_s, grid.tpot_s)
            if not objective.has_limits or not grid.settle(np.nonzero(meets)[0]):
                return meets

    @property
    def cost(self) -> FloatArray:
        """[n] what the goal minimizes."""
        return self.objective.cost(self.grid.e2e_s, self.grid.tokens_per_s_per_chip)

    def front(self, among: BoolArray) -> Iterator[Choice]:
        """The Pareto front of the marked candidates that fit, the best first.

        Whether temporaries fit is asked for candidates on the front alone, until all of them do.
        """
        left = among.copy()
        while True:
            front = self.grid.front(left)
            refused = [i for i in front if not self.grid.fits(int(i))]
            if not refused:
                break
            left[refused] = False
        order = front[np.argsort(self.cost[front], kind="stable")]
        return (self.choice(int(i)) for i in order)

    def ranked(
        self,
        among: BoolArray,
        cost: Callable[[], FloatArray] | None = None,
        *,
        row_of: Callable[[int], Hashable] | None = None,
    ) -> Iterator[Choice]:
        """The marked candidates that fit, by cost; with `row_of`, the first of each row.

        Candidates ahead get times instead of floors, which are no higher, and are then ranked again.
        """
        (at,) = np.nonzero(among)
        rows, is_ranked = set[Hashable](), False
        while not is_ranked:
            order = at[np.argsort((self.cost if cost is None else cost())[at], kind="stable")]
            is_ranked = True
            for place, i in enumerate(order.tolist()):
                row = i if row_of is None else row_of(i)
                if row in rows:
                    continue
                if self.grid.has_floor(i):
                    is_ranked = not self.grid.settle(order[place : place + N_AHEAD])
                    break
                if self.grid.fits(i):
                    rows.add(row)
                    yield self.choice(i)

    def best(self, among: BoolArray, cost: Callable[[], FloatArray] | None = None) -> Choice | None:
        """The marked candidate with the least cost that fits."""
        return next(self.ranked(among, cost), None)

    def choice(self, at: int) -> Choice:
        """A candidate with its figures."""
        grid = self.grid
        ttft_s, tpot_s = float(grid.ttft_s[at]), float(grid.tpot_s[at])
        experiment, memory = grid.experiment(at), grid.memory(at)
        return Choice(experiment=experiment, memory=memory, ttft_s=ttft_s, tpot_s=tpot_s)

    def unquantized(self) -> Choice | None:
        """The best choice whose weights and cache are as wide as the activations."""
        grid, space, among = self.grid, self.grid.space, self.meets
        n_bits = DTYPE_BITS[space.workload.activation_dtype]
        for dtypes, of_candidate in (
            (space.weight_dtypes, grid.weight_dtype),
            (space.cache_dtypes, grid.cache_dtype),
        ):
            among = (
                among & np.array([DTYPE_BITS[dtype] >= n_bits for dtype in dtypes])[of_candidate]
            )
        return self.best(among)

    def request_cost(self, choice: Choice) -> RequestCost:
        """The cost of a request, or of a sequence where the goal is throughput."""
        experiment, chip = choice.experiment, self.grid.space.topology.chip
        cost = request_cost(
            predicted_times(experiment, self.grid.space.profile),
            n_decode_steps=experiment.workload.n_decode_steps,
            chip=chip.name,
        )
        is_throughput = self.objective.goal is Goal.THROUGHPUT
        return cost.per(experiment.workload.batch) if is_throughput else cost

    def equals(self, winner: Choice, best: Sequence[Choice]) -> Iterator[Choice]:
        """The next best choices of other plans, up to the first that does not equal the winner."""
        cost = self.request_cost(winner)
        others = [one for one in best if one.experiment.plan != winner.experiment.plan]
        return takewhile(lambda one: are_equal(cost, self.request_cost(one)), others[:N_EQUALS])

    @cached_property
    def has_own_format(self) -> BoolArray:
        """[n] whether a candidate has the checkpoint's own format of weights."""
        space = self.grid.space
        is_own = [dtype == space.model.default_weight_dtype for dtype in space.weight_dtypes]
        return np.array(is_own)[self.grid.weight_dtype]

    def is_own_format(self, choice: Choice) -> bool:
        """Whether a choice has the checkpoint's own format of weights."""
        dtype = choice.experiment.workload.weight_dtype
        return dtype == self.grid.space.model.default_weight_dtype

    def own_format(self, choice: Choice) -> Choice:
        """The best choice of the same plan in the checkpoint's own format if it equals the choice, else the choice."""
        if self.is_own_format(choice):
            return choice
        of_plan = self.grid.plan == self.grid.plans.index(choice.experiment.plan)
        stored = self.best(self.meets & self.has_own_format & of_plan)
        is_equal = stored and are_equal(self.request_cost(choice), self.request_cost(stored))
        return stored if stored and is_equal else choice

    def won_by(self, winner: Choice, best: Sequence[Choice]) -> WonBy | None:
        """The winner against the best of the others with other axes; None if there are none."""
        plan = winner.experiment.plan
        runner_up = next((choice for choice in best if choice.experiment.plan != plan), None)
        if runner_up is None:
            return None
        grid, workload, other = self.grid, winner.experiment.workload, runner_up.experiment
        # The other plan with the winner's workload except the chunk.
        is_same = (
            (grid.plan == grid.plans.index(other.plan))
            & (grid.batch == workload.batch)
            & (grid.weight_dtype == grid.space.weight_dtypes.index(workload.weight_dtype))
            & (grid.cache_dtype == grid.space.cache_dtypes.index(workload.cache_dtype))
        )
        (at,) = np.nonzero(is_same)
        if not len(at):
            batch = workload.batch
            said = f"'{other.plan}' does not take batch {batch} at this precision in its memory"
            return WonBy(runner_up=runner_up, seconds={}, wire_bytes={}, sentence=said)
        same = grid.experiment(int(at[self.cost[at].argmin()]))
        gains = step_gains(winner.experiment, same, grid.space.profile)
        clauses = ", ".join(gains.clauses) or "takes the same time"
        return WonBy(
            runner_up=runner_up,
            sentence=f"over '{other.plan}' at the same batch and precision, a request {clauses}",
            **picked(gains, "seconds", "wire_bytes"),
        )


class StepGains(NamedTuple):
    """What a request of one experiment saves against another by cause: seconds, and bytes per device.

    `clauses` say it for the largest causes.
    """

    seconds: Mapping[str, float]
    wire_bytes: Mapping[str, float]
    clauses: tuple[str, ...]


def step_gains(first: Experiment, other: Experiment, profile: ChipProfile | None) -> StepGains:
    """What a request of the first experiment saves against the other, by prediction."""
    sides = (first, other)
    times = tuple(predicted_times(side, profile) for side in sides)
    mine, others = (_request_costs(*pair, profile) for pair in zip(sides, times, strict=True))
    seconds, sent_bytes = (
        {key: b.get(key, 0.0) - a.get(key, 0.0) for key in dict.fromkeys((*a, *b))}
        for a, b in zip(mine, others, strict=True)
    )
    large = sorted(seconds, key=lambda key: -abs(seconds[key]))[:3]
    clauses = list[str]()
    for key in (key for key in large if abs(seconds[key]) >= MIN_GAIN_S):
        text = f"{'saves' if seconds[key] > 0 else 'adds'} {format_seconds(abs(seconds[key]))} of {key}"
        if gain_bytes := sent_bytes.get(key):
            sign = "-" if gain_bytes > 0 else "+"
            text += f" ({sign}{format_bytes(abs(gain_bytes))} sent per device)"
        clauses.append(text)
    return StepGains(seconds, sent_bytes, tuple(clauses))


def _request_costs(
    experiment: Experiment, times: tuple[StepTime, ...], profile: ChipProfile | None
) -> tuple[dict[str, float], dict[str, float]]:
    seconds, sent_bytes = defaultdict[str, float](float), defaultdict[str, float](float)
    for time in times:
        is_decode = time.phase is Phase.DECODE
        n = experiment.workload.n_decode_steps if is_decode else 1
        seconds["compute"] += n * time.compute_s
        seconds["waiting for stages"] += n * time.idle_s
        form = plan_form(experiment, time.phase, profile=profile)
        steps = steps_of([form], [experiment.workload])
        for m, collective in enumerate(form.collectives):
            axis = collective.planned.axis
            is_of_experts = collective.planned.part in {Part.MOE_DISPATCH, Part.MOE_COMBINE}
            is_exchange = is_of_experts and axis != "tp"
            cause = EXCHANGE if is_exchange else f"communication over {axis}"
            seconds[cause] += n * float(steps.exposed_s[0, m])
            sent_bytes[cause] += n * wire_bytes(form, steps, 0, m)
    return dict(seconds), dict(sent_bytes)
