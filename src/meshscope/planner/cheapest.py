"""The cheapest slice that meets an objective: slices by price, each searched for its best plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from meshscope.errors import SpecError
from meshscope.hardware.topology import Topology
from meshscope.planner.combinations import SearchSpace
from meshscope.planner.objective import Goal, Objective
from meshscope.planner.progress import SearchProgress
from meshscope.planner.search import PlanSearch, search
from meshscope.planner.slices import price_per_hour, slice_name
from meshscope.units import format_seconds
from meshscope.workers import Progress

MAX_UNMET = 150_000  # combinations without an answer, about a minute, after which no larger slice is searched


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSearch:
    """The searches of the slices that were tried, cheapest first.

    With limits, or without prices, the last slices have the same price, and at least one of them meets the
    objective; none does if `best` is None. `n_skipped` slices are more expensive and were not searched, as one meets
    the objective or after MAX_UNMET combinations that do not, and `n_too_slow` are above the limits even at their peak rates. The chips `unpriced` have no price.
    """

    searches: tuple[PlanSearch, ...]
    best: PlanSearch | None
    n_skipped: int
    n_too_slow: int
    unpriced: tuple[str, ...]
    prices: Mapping[str, float] | None

    @property
    def has_limits(self) -> bool:
        """Whether a latency is limited."""
        return self.searches[0].objective.has_limits

    @property
    def is_cheapest(self) -> bool:
        """Whether `best` is on the slice with the lowest price, and not the one with the best figures."""
        return _stops(self.searches[0].objective, self.prices)

    @property
    def closest(self) -> PlanSearch | None:
        """The search whose closest choice exceeds the limits by the smallest factor."""
        near = [result for result in self.searches if result.closest is not None]
        return min(near, key=_excess, default=None)

    @property
    def shown(self) -> PlanSearch:
        """The best search, else the closest, else that of the largest slice."""
        return self.best or self.closest or self.searches[-1]

    def price(self, result: PlanSearch) -> float:
        """The price of a slice per hour; its number of chips without prices."""
        return _price(result.space.topology, self.prices)

    def price_per_million(self, result: PlanSearch) -> float | None:
        """The price of a million output tokens of the best choice, one batch of requests after the other."""
        return None if self.prices is None else _price_per_million(result, self.prices)


def _stops(objective: Objective, prices: Mapping[str, float] | None) -> bool:
    """Whether the cheapest slice that meets the objective is the answer."""
    return objective.has_limits or prices is None


def _price(topology: Topology, prices: Mapping[str, float] | None) -> float:
    price = price_per_hour(topology, prices)
    assert price is not None  # slices without a price are left out
    return price


def _price_per_million(result: PlanSearch, prices: Mapping[str, float] | None) -> float | None:
    if result.winner is None:
        return None
    n_per_hour = result.winner.tokens_per_s_per_chip * result.space.topology.n_chips * 3600
    return 1e6 * _price(result.space.topology, prices) / n_per_hour


def search_slices(
    space: SearchSpace,
    slices: Iterable[Topology],
    objective: Objective,
    prices: Mapping[str, float] | None = None,
    callback: Progress | None = None,
) -> SliceSearch:
    """The best plan on the cheapest slice that meets the objective, of equally cheap ones by its goal.

    With prices and without limits, all slices are searched, and the best has the lowest price of a token, or
    the shortest request. The topology of `space` is replaced by each of the slices. `callback` gets the
    progress of a long search.
    """
    every = tuple(slices)
    priced = [t for t in every if price_per_hour(t, prices) is not None]
    unpriced = tuple(dict.fromkeys(t.chip.name for t in every if t not in priced))
    if not priced:
        raise SpecError(
            f"--prices has no price of {', '.join(unpriced)}, which --topology names. "
            f"Add {unpriced[0]}=PRICE per chip hour."
        )
    spaces = {
        t: replace(space, topology=t) for t in sorted(priced, key=lambda t: _price(t, prices))
    }
    ordered = tuple(t for t, one in spaces.items() if is_reachable(one, objective))
    if not ordered:
        raise unreachable(tuple(spaces.values()), objective)
    progress, searches = SearchProgress(callback, n_slices=len(ordered)), list[PlanSearch]()
    best: PlanSearch | None = None
    for _, group in groupby(ordered, key=lambda topology: _price(topology, prices)):
        results = [search(spaces[topology], objective, progress) for topology in group]
        searches += results
        if _stops(objective, prices):
            best = min((r for r in results if r.winner is not None), key=_rank, default=None)
            is_long = sum(result.n_combinations for result in searches) >= MAX_UNMET
            if best is not None or is_long:
                break
    if not _stops(objective, prices):
        able = [result for result in searches if result.winner is not None]
        is_throughput = objective.goal is Goal.THROUGHPUT
        best = min(
            able,
            key=lambda r: (_price_per_million(r, prices) or 0.0) if is_throughput else _rank(r),
            default=None,
        )
    progress.done()
    return SliceSearch(
        searches=tuple(searches),
        best=best,
        n_skipped=len(ordered) - len(searches),
        n_too_slow=len(spaces) - len(ordered),
        unpriced=unpriced,
        prices=prices,
    )


def unreachable(spaces: Sequence[SearchSpace], objective: Objective) -> SpecError:
    """That the peak rates of no slice allow the limits, with the best slice for each."""
    reasons = list[str]()
    for at, (name, limit_s, what) in enumerate(
        (
            (
                "ttft",
                objective.ttft_s,
                "prefill of {} prompt tokens, at the peak FLOP and HBM rates,",
            ),
            (
                "tpot",
                objective.tpot_s,
                "a decode step, which reads the weights at the peak HBM rate,",
            ),
        )
    ):
        best = min(spaces, key=lambda space: space.least_s[at])
        if limit_s is not None and limit_s < best.least_s[at]:
            tokens = f"{best.batches.least * best.workload.prompt:,}"
            reasons.append(
                f"{name}={limit_s:g} is not possible: {what.format(tokens)} takes at least "
                f"{format_seconds(best.least_s[at])}, on {slice_name(best.topology)}"
            )
    if not reasons:
        reasons.append("no slice allows both limits at its peak rates")
    return SpecError(f"--slo: {'; '.join(reasons)}. Use larger limits.")


def is_reachable(space: SearchSpace, objective: Objective) -> bool:
    """Whether the peak rates of the slice allow the limits."""
    limits = (objective.ttft_s, objective.tpot_s)
    return all(
        limit is None or limit >= least for limit, least in zip(limits, space.least_s, strict=True)
    )


def _rank(result: PlanSearch) -> float:
    """What the goal minimizes, of the winner."""
    assert result.winner is not None
    match result.objective.goal:
        case Goal.THROUGHPUT:
            return -result.winner.tokens_per_s_per_chip * result.space.topology.n_chips
        case Goal.LATENCY:
            return result.winner.e2e_s


def _excess(result: PlanSearch) -> float:
    """The factor by which the closest choice exceeds a limit."""
    closest, objective = result.closest, result.objective
    assert closest is not None
    limits = ((closest.ttft_s, objective.ttft_s), (closest.tpot_s, objective.tpot_s))
    return max((value / limit for value, limit in limits if limit is not None), default=0.0)
