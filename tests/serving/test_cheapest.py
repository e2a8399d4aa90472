"""The cheapest slice that meets an objective, against a search of every slice."""

from dataclasses import replace

import pytest

from meshscope.errors import SpecError
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.memory import FitState
from meshscope.plans.workload import Workload
from meshscope.reports.slices import slice_notes
from meshscope.reports.words import counted
from meshscope.serving import slices as slices_module
from meshscope.serving.grid import grid_of
from meshscope.serving.objective import Goal, objective_of
from meshscope.serving.search import plans_of, search
from meshscope.serving.slices import parse_prices, parse_slices, search_slices
from meshscope.serving.space import Batches, SearchSpace

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
    prices = None if text is None else parse_prices(text)
    result = search_slices(space(), SLICES, objective_of(slo), prices)
    price = {t.name: t.n_chips * (prices or {t.chip.name: 1})[t.chip.name] for t in SLICES}
    chosen = result.best.space.topology.name
    assert price[chosen] == min(price[name] for name in meeting(slo))
    n_judged = len(result.searches) + result.n_skipped + result.n_too_slow
    assert n_judged == len(SLICES)


def test_equally_cheap_slices_are_judged_by_the_goal() -> None:
    slices = parse_slices("v5e-8,v6e-8")
    for goal in Goal:
        result = search_slices(space(), slices, objective_of("ttft=5,tpot=0.1", goal))
        assert result.best.space.topology.chip.name == "v6e"
        assert len(result.searches) == 2


def test_an_objective_that_nothing_meets_names_the_closest_slice(monkeypatch) -> None:
    """And a long search without an answer ends with what is known."""
    result = search_slices(space(), SLICES, objective_of("ttft=1,tpot=0.005"))
    assert (result.best, result.n_skipped) == (None, 0)
    closest = (r for r in result.searches if r.closest is not None)
    assert result.shown is min(closest, key=lambda r: r.closest.tpot_s)

    monkeypatch.setattr(slices_module, "MAX_UNMET", 1)
    result = search_slices(space(), SLICES, objective_of("ttft=1,tpot=0.005"))
    n_left = len(SLICES) - 1 - result.n_too_slow
    assert (result.best, result.n_skipped, len(result.searches)) == (None, n_left, 1)
    said = f"And {counted(n_left, 'more expensive slice')}, not searched: --topology names them"
    assert said in list(slice_notes(result))


def test_with_prices_and_without_limits_the_cheapest_token_wins() -> None:
    prices = parse_prices("v6e=2.7,v5e=1.2")
    result = search_slices(space(), SLICES, objective_of(None), prices)
    assert (result.n_skipped, len(result.searches)) == (0, len(SLICES))
    costs: dict[str, float] = {}
    for one in result.searches:
        if one.winner is not None:
            topology, batch = one.space.topology, one.winner.experiment.workload.batch
            hourly = topology.n_chips * prices[topology.chip.name]
            costs[topology.name] = hourly / 3600 * one.winner.e2e_s / (batch * 128) * 1e6
    assert result.best.space.topology.name == min(costs, key=lambda name: costs[name])
    assert result.price_per_million(result.best) == pytest.approx(min(costs.values()))


def test_chips_without_a_price_are_left_out_and_named() -> None:
    result = search_slices(space(), SLICES, objective_of("ttft=5"), parse_prices("v6e=2.7"))
    assert {r.space.topology.chip.name for r in result.searches} == {"v6e"}
    assert result.unpriced == ("v5e",)
    with pytest.raises(SpecError, match=r"no price of v6e, v5e.*Add v6e=PRICE"):
        search_slices(space(), SLICES, objective_of("ttft=5"), parse_prices("v4=3"))


@pytest.mark.parametrize(
    ("model", "topology", "dtypes", "batch"),
    [
        ("Qwen/Qwen3-4B", "v6e-4", ("bf16", "s8"), 1),
        ("Qwen/Qwen3-4B", "v5e-16", ("s8",), 8),
        ("Qwen/Qwen3-30B-A3B", "tpu7x-8", ("bf16", "s4"), 1),
        ("openai/gpt-oss-20b", "v6e-8", (), 1),
        ("deepseek-ai/DeepSeek-V2-Lite", "v5p-8", ("bf16", "s8"), 4),
    ],
)
def test_no_candidate_is_faster_than_the_peak_rates_allow(model, topology, dtypes, batch) -> None:
    one = replace(
        space(topology),
        model=read_model(model),
        weight_dtypes=dtypes or (read_model(model).default_weight_dtype,),
        batches=Batches(least=batch, most=64),
        workload=Workload(prompt=256, output=16),
    )
    grid = grid_of(one, plans_of(one))
    assert 0 < one.least_s[0] <= grid.ttft_s.min()
    assert 0 < one.least_s[1] <= grid.tpot_s.min()


def test_slices_below_the_peak_rates_are_not_searched(monkeypatch) -> None:
    """32.8 billion weights of two bytes from one chip of v5e take at least 80 ms, of v6e 40 ms."""
    slices = parse_slices("v6e-1,v5e-1,v6e-8")
    result = search_slices(space(), slices, objective_of("ttft=5,tpot=0.03"))
    assert (result.n_too_slow, len(result.searches)) == (2, 1)

    monkeypatch.delattr("meshscope.serving.slices.search")  # nothing is searched
    for slo, limit in (("ttft=0.000001", "ttft"), ("tpot=0.000001,ttft=9", "tpot")):
        message = f"{limit}=1e-06 is not possible.*at least .*, on v6e-8"
        with pytest.raises(SpecError, match=message):
            search_slices(space(), SLICES, objective_of(slo))


def test_the_winner_fits_with_the_high_end_of_its_estimate() -> None:
    result = search_slices(space(), SLICES, objective_of("ttft=30,tpot=0.5"))
    assert result.best.winner.memory.fit is FitState.YES
