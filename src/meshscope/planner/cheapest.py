"""The cheapest slice that meets an objective: slices by price, each searched for its best plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from meshscope.planner.combinations import SearchSpace
from meshscope.planner.grid import n_combinations
from meshscope.planner.objective import Goal, Objective
from meshscope.planner.progress import SearchProgress
from meshscope.planner.search import PlanSearch, plans_of, search
from meshscope.planner.slices import cheapest_first, price_per_hour
from meshscope.spec.hardware.topology import Topology
from meshscope.workers.spawn import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSearch:
    """The searches of the slices that were tried, cheapest first.

    The last slices have the same price, and at least one of them meets the objective; none does if
    `best` is None. `n_skipped` slices are more expensive and were not searched.
    """

    searches: tuple[PlanSearch, ...]
    best: PlanSearch | None
    n_skipped: int
    prices: Mapping[str, float] | None

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
        return price_per_hour(result.space.topology, self.prices)


def search_slices(
    space: SearchSpace,
    slices: Iterable[Topology],
    objective: Objective,
    prices: Mapping[str, float] | None = None,
    callback: Progress | None = None,
) -> SliceSearch:
    """The best plan on the cheapest slice that meets the objective, of equally cheap ones by its goal.

    The topology of `space` is replaced by each of the slices. `callback` gets the progress of a long search.
    """
    ordered, searches = cheapest_first(slices, prices), list[PlanSearch]()
    spaces = {topology: replace(space, topology=topology) for topology in ordered}
    progress = SearchProgress(
        callback, lambda: sum(n_combinations(one, plans_of(one)) for one in spaces.values())
    )
    best: PlanSearch | None = None
    for _, group in groupby(ordered, key=lambda topology: price_per_hour(topology, prices)):
        results = [search(spaces[topology], objective, progress) for topology in group]
        searches += results
        best = min((r for r in results if r.winner is not None), key=_rank, default=None)
        if best is not None:
            break
    progress.done()
    return SliceSearch(
        searches=tuple(searches),
        best=best,
        n_skipped=len(ordered) - len(searches),
        prices=prices,
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
