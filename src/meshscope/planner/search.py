"""The search for the best plan: legal plans, their candidates, the Pareto front, and the winner."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from meshscope.analysis.agreement import RequestCost, are_equal, request_cost
from meshscope.analysis.floor import why_sentence
from meshscope.cost.closed_activities import wire_bytes
from meshscope.cost.closed_form import plan_form
from meshscope.cost.predicted import evaluated, has_figures, predicted_times
from meshscope.errors import SpecError, read_only
from meshscope.events.enums import REQUEST_PHASES, Part, Phase
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.interconnect.profile import ChipProfile
from meshscope.planner.combinations import SearchSpace
from meshscope.planner.grid import Grid, grid_of
from meshscope.planner.objective import Goal, Objective, pareto_front
from meshscope.planner.placements import MAX_PLACEMENTS, PlacementSearch, search_placements
from meshscope.planner.progress import SearchProgress
from meshscope.planner.space import PlanSpace, plan_space
from meshscope.plans.caches import device_cache_bytes
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import Memory
from meshscope.plans.plan import Plan
from meshscope.serving.transfer import TransferPath, cache_transfer
from meshscope.units import DTYPE_BITS, format_bytes, format_seconds

BoolArray = NDArray[np.bool_]
N_PLACED = 4  # best plans whose placements are predicted
MAX_PLACEMENTS_OF_OTHERS = 32  # for those behind the best
N_BEST = 20  # plans that --verify can compile, and choices off the front
N_EQUALS = 3  # plans after the winner that may equal it
MIN_GAIN_S = 1e-6  # of an axis or of compute in a comparison of two plans
EXCHANGE = "exchange with experts"  # one cause, whatever axes it is over


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One combination of plan, batch, precision and chunk, with its predicted figures.

    `tokens_per_s_per_chip` counts the output tokens of a batch of requests over prefill and all decode
    steps, `decode_tokens_per_s_per_chip` those of decode alone. The latencies are without intervals.
    """

    experiment: Experiment
    ttft_s: float
    tpot_s: float
    e2e_s: float
    tokens_per_s_per_chip: float
    decode_tokens_per_s_per_chip: float
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class WonBy:
    """The winner against the best plan with other axes, both with the winner's batch and precision.

    Seconds and bytes are those of the runner-up minus the winner's, so positive ones are the winner's
    gain. `times` are the steps of the winner and of the runner-up. They are empty, and `sentence` says
    why, if the runner-up does not take the winner's batch.
    """

    runner_up: Choice
    times: tuple[tuple[StepTime, ...], ...]
    seconds: Mapping[str, float]
    wire_bytes: Mapping[str, float]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """The best choice of each phase on a slice of its own.

    `kv_bytes` is the cache of one prompt on all devices that hold it, which moves from one slice to the
    other over DCN in `transfer_s`. That is the time of a prompt alone, before its second token; TTFT and
    TPOT leave it out.
    """

    prefill: Choice
    decode: Choice
    prompts_per_s_per_chip: float
    kv_bytes: int
    transfer_s: float


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """The result of a search; `winner` is None if nothing meets the objective, or nothing fits.

    `n_counted` plans are `n_plans` that divide model and prompt, and the refused ones of `n_refused`, which
    also counts plans without a candidate. `n_combinations` of the former with batch, precision and chunk
    are `n_candidates`, and the pruned ones of `n_pruned`.
    `front` is the Pareto front of TTFT, TPOT and request tokens/s per chip among the choices that meet the
    objective, the best first; `dominated` are the best others. `best` are the best choices of the best plans, one of
    each. The first of `front` and each of `best` have the checkpoint's own format of weights if that equals the
    best (`are_equal`), and `equals` are the others of `best` that equal the winner. If nothing meets the limits,
    `closest` comes closest to them, and `fastest` says how far each latency alone can go.
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
    dominated: tuple[Choice, ...]
    best: tuple[Choice, ...]
    equals: tuple[Choice, ...]
    own_format: Choice | None  # the best in the checkpoint's own format, if the winner is not
    closest: Choice | None
    fastest: tuple[Choice, ...]  # of any choice that fits: the least TTFT, and the least TPOT
    won_by: WonBy | None
    unquantized: Choice | None  # the best with weights and cache as wide as the activations
    apart: Apart | None
    times: tuple[StepTime, ...]  # steps of the winner with intervals
    why: Mapping[Phase, str]
    placements: PlacementSearch | None  # of the winner on the torus

    @property
    def winner(self) -> Choice | None:
        """The best choice that meets the objective."""
        return self.front[0] if self.front else None

    @property
    def is_extrapolated(self) -> bool:
        """Whether the times of the winner leave the range of their measurements."""
        return any(time.is_extrapolated for time in self.times)


def plans_of(space: SearchSpace) -> PlanSpace:
    """The legal plans of a space."""
    return plan_space(space.model, space.topology.n_devices, prompt=space.workload.prompt)


def search(
    space: SearchSpace, objective: Objective, progress: SearchProgress | None = None
) -> PlanSearch:
    """The best plans of a model on a slice; `progress` gets their number before any is predicted.

    SpecError without published figures of the chip or a profile, and for more combinations than fit in
    memory.
    """
    _check(space)
    plans = plans_of(space)
    grid = grid_of(space, plans, progress)
    ranking = GridRanking(grid=grid, objective=objective)
    meets = ranking.meets
    front, best, placements = with_placements(
        ranking, tuple(ranking.front(meets)), tuple(islice(ranking.best_of_plans(), N_BEST))
    )
    best = tuple(map(ranking.own_format, best))
    front = (*map(ranking.own_format, front[:1]), *front)
    front = tuple(dict.fromkeys(front))
    winner = front[0] if front else None
    closest = None if front else ranking.closest()
    times = () if winner is None else predicted_times(winner.experiment, space.profile)
    dtype = None if winner is None else winner.experiment.workload.weight_dtype
    return PlanSearch(
        space=space,
        objective=objective,
        n_counted=plans.n_counted,
        n_plans=len(plans.plans),
        n_combinations=grid.n_combinations,
        n_candidates=len(grid),
        n_meeting=int(meets.sum()),
        n_refused=grid.n_refused,
        n_pruned=grid.n_pruned,
        front=front,
        dominated=tuple(islice(ranking.dominated(front), N_BEST)),
        best=best,
        equals=() if winner is None else tuple(ranking.equals(winner, best)),
        own_format=None if winner is None else ranking.best_of_own_format(winner),
        closest=closest,
        fastest=() if front else tuple(ranking.fastest()),
        won_by=None if winner is None else ranking.won_by(winner, best),
        unquantized=None if winner is None else ranking.unquantized(),
        apart=None if winner is None else ranking.apart(),
        times=times,
        why={time.phase: why_sentence(time, space.topology.chip, dtype) for time in times},
        placements=None if winner is None else placements.get(winner.experiment.plan),
    )


def with_placements(
    ranking: "GridRanking", front: tuple[Choice, ...], best: tuple[Choice, ...]
) -> tuple[tuple[Choice, ...], tuple[Choice, ...], dict[Plan, PlacementSearch | None]]:
    """The front and the best of each plan again, with the first plans placed on the torus.

    A placement is found for the best choice of a plan and kept for its others.
    """
    profile = ranking.grid.space.profile
    searches = {
        choice.experiment.plan: search_placements(
            choice.experiment,
            profile,
            max_placements=MAX_PLACEMENTS if index == 0 else MAX_PLACEMENTS_OF_OTHERS,
        )
        for index, choice in enumerate(best[:N_PLACED])
    }
    orders = {
        plan: result.best.experiment.device_order
        for plan, result in searches.items()
        if result is not None and result.best is not None
    }

    def placed(choice: Choice) -> Choice:
        order = orders.get(choice.experiment.plan)
        if order is None:
            return choice
        return ranking.priced(replace(choice.experiment, device_order=order), choice.memory)

    best = tuple(sorted(map(placed, best), key=ranking.cost_of))
    on_front = [placed(choice) for choice in front]
    every = sorted([*on_front, *(c for c in best[:1] if c not in on_front)], key=ranking.cost_of)
    figures = np.array([[c.ttft_s, c.tpot_s, -c.tokens_per_s_per_chip] for c in every])
    kept = sorted(pareto_front(figures.reshape(-1, 3)))
    return tuple(every[i] for i in kept), best, searches


def _check(space: SearchSpace) -> None:
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


@dataclass(frozen=True, kw_only=True)  # without slots, so that it keeps what it derives
class GridRanking:
    """The order of the candidates of a grid under an objective."""

    grid: Grid
    objective: Objective

    @cached_property
    def meets(self) -> BoolArray:
        """[n] whether a candidate is within the limits."""
        ttft_s, tpot_s = self.objective.ttft_s, self.objective.tpot_s
        is_fast = self.grid.ttft_s <= (np.inf if ttft_s is None else ttft_s)
        return is_fast & (self.grid.tpot_s <= (np.inf if tpot_s is None else tpot_s))

    @cached_property
    def cost(self) -> NDArray[np.float64]:
        """[n] what the goal minimizes."""
        match self.objective.goal:
            case Goal.THROUGHPUT:
                return -self.grid.tokens_per_s_per_chip
            case Goal.LATENCY:
                return self.grid.e2e_s

    def front(self, among: BoolArray) -> Iterator[Choice]:
        """The Pareto front of the marked candidates that fit, the best first.

        Whether temporaries fit is asked for candidates on the front alone, until all of them do.
        """
        grid, left = self.grid, among.copy()
        figures = np.stack([grid.ttft_s, grid.tpot_s, -grid.tokens_per_s_per_chip], axis=1)
        while True:
            (at,) = np.nonzero(left)
            front = at[pareto_front(figures[at])]
            refused = [i for i in front if not grid.fits(int(i))]
            if not refused:
                break
            left[refused] = False
        order = front[np.argsort(self.cost[front], kind="stable")]
        return (self.choice(int(i)) for i in order)

    def best(self, among: BoolArray, cost: NDArray[np.float64] | None = None) -> int | None:
        """The marked candidate with the least cost that fits."""
        cost = self.cost if cost is None else cost
        (at,) = np.nonzero(among)
        ordered = at[np.argsort(cost[at], kind="stable")]
        return next((int(i) for i in ordered if self.grid.fits(int(i))), None)

    def best_of_plans(self) -> Iterator[Choice]:
        """The best choice of each plan that meets the limits and fits, the best plan first."""
        seen = np.zeros(len(self.grid.plans), dtype=np.bool_)
        (at,) = np.nonzero(self.meets)
        for i in at[np.argsort(self.cost[at], kind="stable")]:
            plan = self.grid.plan[i]
            if not seen[plan] and self.grid.fits(int(i)):
                seen[plan] = True
                yield self.choice(int(i))

    def closest(self) -> Choice | None:
        """The choice that exceeds the limits by the smallest factor."""
        ttft_s, tpot_s = self.objective.ttft_s or np.inf, self.objective.tpot_s or np.inf
        excess = np.maximum(self.grid.ttft_s / ttft_s, self.grid.tpot_s / tpot_s)
        at = self.best(np.ones(len(excess), dtype=bool), excess)
        return None if at is None else self.choice(at)

    def fastest(self) -> Iterator[Choice]:
        """The choices that fit with the least TTFT, and with the least TPOT."""
        every = np.ones(len(self.grid), dtype=np.bool_)
        for seconds in (self.grid.ttft_s, self.grid.tpot_s):
            at = self.best(every, seconds)
            if at is not None:
                yield self.choice(at)

    def choice(self, at: int) -> Choice:
        """A candidate with its figures."""
        grid = self.grid
        seconds = (float(grid.ttft_s[at]), float(grid.tpot_s[at]))
        return self._choice(grid.experiment(at), *seconds, grid.memory(at))

    def priced(self, experiment: Experiment, memory: Memory) -> Choice:
        """An experiment with its figures, predicted apart from the grid."""
        forms = (
            plan_form(experiment, phase, profile=self.grid.space.profile)
            for phase in REQUEST_PHASES
        )
        ttft_s, tpot_s = (evaluated(form, experiment.workload)[1].value_s for form in forms)
        return self._choice(experiment, ttft_s, tpot_s, memory)

    @staticmethod
    def _choice(experiment: Experiment, ttft_s: float, tpot_s: float, memory: Memory) -> Choice:
        workload, n_chips = experiment.workload, experiment.topology.n_chips
        e2e_s = ttft_s + workload.n_decode_steps * tpot_s
        return Choice(
            experiment=experiment,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=e2e_s,
            tokens_per_s_per_chip=workload.batch * workload.output / (e2e_s * n_chips),
            decode_tokens_per_s_per_chip=workload.batch / tpot_s / n_chips,
            memory=memory,
        )

    def cost_of(self, choice: Choice) -> float:
        """What the goal minimizes."""
        is_throughput = self.objective.goal is Goal.THROUGHPUT
        return -choice.tokens_per_s_per_chip if is_throughput else choice.e2e_s

    def unquantized(self) -> Choice | None:
        """The best choice whose weights and cache are as wide as the activations."""
        space = self.grid.space
        n_bits = DTYPE_BITS[space.workload.activation_dtype]
        is_wide = (
            np.array([DTYPE_BITS[dtype] >= n_bits for dtype in dtypes])[of_candidate]
            for dtypes, of_candidate in (
                (space.weight_dtypes, self.grid.weight_dtype),
                (space.cache_dtypes, self.grid.cache_dtype),
            )
        )
        at = self.best(np.logical_and.reduce([self.meets, *is_wide]))
        return None if at is None else self.choice(at)

    def dominated(self, front: Sequence[Choice]) -> Iterator[Choice]:
        """The best choices that fit and are not on the front, with their best chunk."""
        grid, (at,) = self.grid, np.nonzero(self.meets)
        seen = {_row_of(choice.experiment) for choice in front}
        for i in at[np.argsort(self.cost[at], kind="stable")]:
            row = _row_of(grid.experiment(int(i)))
            if row not in seen and grid.fits(int(i)):
                seen.add(row)
                yield self.choice(int(i))

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
    def _has_own_format(self) -> BoolArray:
        """[n] whether a candidate meets the limits in the checkpoint's own format of weights."""
        space = self.grid.space
        is_own = [dtype == space.model.default_weight_dtype for dtype in space.weight_dtypes]
        return self.meets & np.array(is_own)[self.grid.weight_dtype]

    def best_of_own_format(self, winner: Choice) -> Choice | None:
        """The best choice in the checkpoint's own format; None if the winner has it."""
        if winner.experiment.workload.weight_dtype == self.grid.space.model.default_weight_dtype:
            return None
        at = self.best(self._has_own_format)
        return None if at is None else self.choice(at)

    def own_format(self, choice: Choice) -> Choice:
        """The best choice of the same plan in the checkpoint's own format if it equals the choice, else that."""
        if choice.experiment.workload.weight_dtype == self.grid.space.model.default_weight_dtype:
            return choice
        of_plan = self.grid.plan == self.grid.plans.index(choice.experiment.plan)
        at = self.best(self._has_own_format & of_plan)
        if at is None:
            return choice
        in_own_format = self.choice(at)
        order = choice.experiment.device_order
        if order is not None:
            in_own_format = self.priced(
                replace(in_own_format.experiment, device_order=order), in_own_format.memory
            )
        return (
            in_own_format
            if are_equal(self.request_cost(choice), self.request_cost(in_own_format))
            else choice
        )

    def won_by(self, winner: Choice, best: Sequence[Choice]) -> WonBy | None:
        """The winner against the best of the others with other axes; None if there are none."""
        plan = winner.experiment.plan
        runner_up = next((choice for choice in best if choice.experiment.plan != plan), None)
        if runner_up is None:
            return None
        same = self._same(winner, runner_up.experiment)
        return _comparison(winner, runner_up, same, self.grid.space.profile)

    def _same(self, winner: Choice, other: Experiment) -> Experiment | None:
        """The other plan with the workload of the winner, but for the chunk; None if none fits."""
        grid, workload = self.grid, winner.experiment.workload
        is_same = (
            (grid.plan == grid.plans.index(other.plan))
            & (grid.batch == workload.batch)
            & (grid.weight_dtype == grid.space.weight_dtypes.index(workload.weight_dtype))
            & (grid.cache_dtype == grid.space.cache_dtypes.index(workload.cache_dtype))
        )
        (same,) = np.nonzero(is_same)
        if not len(same):
            return None
        at = int(same[self.cost[same].argmin()])
        return replace(grid.experiment(at), device_order=other.device_order)

    def apart(self) -> Apart | None:
        """The best prefill and the best decode on slices of their own."""
        grid, limits = self.grid, self.objective
        n_chips = grid.space.topology.n_chips
        is_throughput = limits.goal is Goal.THROUGHPUT
        prefill = self.best(
            grid.ttft_s <= (limits.ttft_s or np.inf),
            grid.ttft_s / grid.batch if is_throughput else grid.ttft_s,
        )
        decode = self.best(
            grid.tpot_s <= (limits.tpot_s or np.inf),
            grid.tpot_s / grid.batch if is_throughput else grid.tpot_s,
        )
        if prefill is None or decode is None:
            return None
        experiments = (grid.experiment(prefill), grid.experiment(decode))
        profile, prompt = grid.space.profile, grid.space.workload.prompt
        constants = None if profile is None else profile.constants
        transfer = cache_transfer(*experiments, TransferPath.DCN, constants)
        return Apart(
            prefill=self.choice(prefill),
            decode=self.choice(decode),
            prompts_per_s_per_chip=float(grid.batch[prefill] / grid.ttft_s[prefill] / n_chips),
            kv_bytes=_prompt_bytes(experiments[1]),
            transfer_s=transfer.seconds(prompt),
        )


def _row_of(experiment: Experiment) -> tuple[Plan, int, str, str]:
    """What the rows of a table of choices differ in."""
    workload = experiment.workload
    return (experiment.plan, workload.batch, workload.weight_dtype, workload.cache_dtype)


def _prompt_bytes(experiment: Experiment) -> int:
    """Cache bytes of one prompt on all devices of its replica."""
    plan, workload = experiment.plan, experiment.workload
    one = replace(workload, batch=plan.data_size)
    n_bytes = device_cache_bytes(experiment.model, plan, one) * plan.tp * plan.cp * plan.pp
    return n_bytes * workload.prompt // workload.context


def _comparison(
    winner: Choice, runner_up: Choice, same: Experiment | None, profile: ChipProfile | None
) -> WonBy:
    """Why the winner is better than the runner-up, at the winner's batch and precision."""
    name, batch = runner_up.experiment.plan, winner.experiment.workload.batch
    if same is None:
        sentence = f"'{name}' does not take batch {batch} at this precision in its memory"
        return WonBy(runner_up=runner_up, times=(), seconds={}, wire_bytes={}, sentence=sentence)
    sides = (winner.experiment, same)
    times = tuple(predicted_times(side, profile) for side in sides)
    mine, other = (_request_costs(*pair, profile) for pair in zip(sides, times, strict=True))
    seconds, sent_bytes = (
        {key: b.get(key, 0.0) - a.get(key, 0.0) for key in dict.fromkeys((*a, *b))}
        for a, b in zip(mine, other, strict=True)
    )
    clauses = [_clause(key, value, sent_bytes.get(key)) for key, value in _ranked(seconds)]
    sentence = f"over '{name}' at the same batch and precision, a request "
    sentence += ", ".join(clauses) if clauses else "takes the same time"
    return WonBy(
        runner_up=runner_up,
        times=times,
        seconds=seconds,
        wire_bytes=sent_bytes,
        sentence=sentence,
    )


def _ranked(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """The differences that matter, the largest first."""
    large = [(key, value) for key, value in seconds.items() if abs(value) >= MIN_GAIN_S]
    return sorted(large, key=lambda pair: -abs(pair[1]))[:3]


def _clause(key: str, gain_s: float, gain_bytes: float | None) -> str:
    verb = "saves" if gain_s > 0 else "adds"
    text = f"{verb} {format_seconds(abs(gain_s))} of {key}"
    if gain_bytes:
        text += (
            f" ({'-' if gain_bytes > 0 else '+'}{format_bytes(abs(gain_bytes))} sent per device)"
        )
    return text


def _request_costs(
    experiment: Experiment, times: tuple[StepTime, ...], profile: ChipProfile | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and sent bytes of a device by cause in a request: prefill and all decode steps."""
    seconds, sent_bytes = defaultdict[str, float](float), defaultdict[str, float](float)
    for time in times:
        is_decode = time.phase is Phase.DECODE
        n = experiment.workload.n_decode_steps if is_decode else 1
        seconds["compute"] += n * time.compute_s
        seconds["waiting for stages"] += n * time.idle_s
        form = plan_form(experiment, time.phase, profile=profile)
        steps, _ = evaluated(form, experiment.workload)
        for m, collective in enumerate(form.collectives):
            is_of_experts = collective.part in {Part.MOE_DISPATCH, Part.MOE_COMBINE}
            is_exchange = is_of_experts and collective.axis != "tp"
            cause = EXCHANGE if is_exchange else f"communication over {collective.axis}"
            seconds[cause] += n * float(steps.exposed_s[0, m])
            sent_bytes[cause] += n * wire_bytes(form, steps, 0, m)
    return dict(seconds), dict(sent_bytes)


def interval_of(times: tuple[StepTime, ...], phase: Phase) -> TimeEstimate | None:
    """The step of a phase with its interval."""
    return next((time.step for time in times if time.phase is phase), None)
