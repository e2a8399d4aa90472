"""The cheapest slice that meets an objective, against a search of every slice."""

import pytest

from meshscope.planner.batches import Batches
from meshscope.planner.cheapest import search_slices
from meshscope.planner.combinations import SearchSpace
from meshscope.planner.objective import Goal, objective_of
from meshscope.planner.search import search
from meshscope.planner.slices import parse_prices, parse_slices
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.memory import FitState
from meshscope.spec.workload import Workload

SLICES = parse_slices("v6e-1,v6e-4,v6e-8,v5e-4,v5e-8,v5e-16")


def space(topology: str = "v6e-1") -> SearchSpace:
    return SearchSpace(
        model=read_model("Qwen/Qwen3-32B"),
        topology=parse_topology(topology),
        workload=Workload(prompt=1024, output=128),
        batches=Batches(least=1, most=64),
        weight_dtypes=("bf16",),
        cache_dtypes=("bf16",),
    )


def meeting(slo: str) -> set[str]:
    """The slices that meet an objective, each searched on its own."""
    objective = objective_of(slo)
    searches = (search(space(topology.name), objective) for topology in SLICES)
    return {r.space.topology.name for r in searches if r.winner is not None}


@pytest.mark.slow
@pytest.mark.parametrize("slo", ["ttft=1,tpot=0.03", "ttft=0.2,tpot=0.008"])
@pytest.mark.parametrize("text", [None, "v6e=2.7,v5e=1.2", "v6e=1,v5e=9"])
def test_no_cheaper_slice_meets_the_objective(slo: str, text: str | None) -> None:
    prices = None if text is None else parse_prices(text, SLICES)
    result = search_slices(space(), SLICES, objective_of(slo), prices)
    assert result.best is not None
    price = {t.name: t.n_chips * (prices or {t.chip.name: 1})[t.chip.name] for t in SLICES}
    chosen = result.best.space.topology.name
    assert price[chosen] == min(price[name] for name in meeting(slo))
    assert len(result.searches) + result.n_skipped == len(SLICES)


def test_equally_cheap_slices_are_judged_by_the_goal() -> None:
    slices = parse_slices("v5e-8,v6e-8")
    for goal in Goal:
        result = search_slices(space(), slices, objective_of("ttft=5,tpot=0.1", goal))
        assert result.best is not None
        assert result.best.space.topology.chip.name == "v6e"
        assert len(result.searches) == 2


def test_an_objective_that_nothing_meets_names_the_closest_slice() -> None:
    result = search_slices(space(), SLICES, objective_of("ttft=1,tpot=0.0001"))
    assert (result.best, result.n_skipped) == (None, 0)
    fastest = min(
        (r for r in result.searches if r.closest is not None),
        key=lambda r: r.closest.tpot_s,  # type: ignore[union-attr]
    )
    assert result.shown is fastest


def test_the_winner_fits_with_the_high_end_of_its_estimate() -> None:
    result = search_slices(space(), SLICES, objective_of("ttft=30,tpot=0.5"))
    assert result.best is not None
    assert result.best.winner is not None
    assert result.best.winner.memory.fit is FitState.YES
