"""Which slice: what fits on each, with every serving plan tried, and what it costs."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
from made import experiment_with, space_with
from tables import table

import meshscope
from meshscope.api.sweep import note_prices
from meshscope.cost.memory import largest_batch, predicted_memory
from meshscope.errors import MeshscopeError, SpecError
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.config import read_model
from meshscope.plans.chunks import ChunkRule
from meshscope.plans.memory import FitState
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload
from meshscope.reports.slices import slice_lines
from meshscope.reports.words import counted
from meshscope.serving import slices as slices_module
from meshscope.serving.grid import grid_of
from meshscope.serving.objective import Goal, objective_of
from meshscope.serving.prices import LIST, LIST_NOTE, LIST_PRICES, parse_prices, price_per_hour
from meshscope.serving.search import search
from meshscope.serving.slices import parse_slices, search_slices, slice_fit, slice_fits
from meshscope.serving.space import Batches

WORKLOAD = Workload(prompt=1024, output=128)
LLAMA = read_model("meta-llama/Llama-3.3-70B")


def batches(topology: Topology) -> Iterator[tuple[int, str]]:
    """The largest batch of every tp x dp, one plan after the other."""
    n = topology.n_devices
    for tp in range(1, n + 1):
        if n % tp:
            continue
        plan = parse_plan(f"tp={tp},dp={n // tp}")
        workload = Workload(batch=n // tp, prompt=1024, output=128)
        try:
            experiment = experiment_with(LLAMA, plan, topology, workload=workload)
        except MeshscopeError:
            continue
        yield largest_batch(experiment), str(plan)


@pytest.mark.parametrize("name", ["v6e-8", "v6e-16", "v5p-8", "v5e-16"])
def test_the_plan_of_a_slice_has_the_largest_batch_of_all(name: str) -> None:
    fit = slice_fit(LLAMA, parse_topology(name), WORKLOAD)
    assert (fit.largest_batch, str(fit.plan)) == max(batches(parse_topology(name)))
    assert fit.memory.fit is FitState.YES


def test_a_slice_that_is_too_small_has_no_batch_and_a_mixture_spreads_its_experts() -> None:
    """141 GB of weights on 4 x 31.25 GiB; DeepSeek-V3.1 in bf16, 1.3 TB, on 64 chips."""
    fit = slice_fit(LLAMA, parse_topology("v6e-4"), WORKLOAD)
    assert (fit.memory.fit, fit.largest_batch, str(fit.plan)) == (FitState.NO, 0, "tp=4")
    deepseek = read_model("deepseek-ai/DeepSeek-V3.1-Base")
    fit = slice_fit(deepseek, parse_topology("v6e-64"), WORKLOAD)
    assert fit.plan.ep == 64
    assert fit.largest_batch > 0


def test_a_batch_that_is_given_shortens_the_context() -> None:
    one, many = (slice_fit(LLAMA, parse_topology("v6e-8"), WORKLOAD, batch=n) for n in (None, 64))
    assert one.context.is_of_model
    assert many.context.positions < one.context.positions
    assert one.largest_batch == many.largest_batch


@pytest.mark.parametrize("chunk", [ChunkRule.AUTO, 1024])
@pytest.mark.parametrize("batch", [8, 64, 256])
@pytest.mark.parametrize("name", ["v6e-8", "v5e-16", "v5p-8"])
def test_a_batch_that_is_given_is_answered_for(name, batch, chunk) -> None:
    """The memory is that of `predict`, and the batch fits where it is no larger than the largest."""
    topology, long = parse_topology(name), replace(WORKLOAD, prompt=8192, cache_dtype="s8")
    fit = slice_fit(LLAMA, topology, long, batch=batch, chunk=chunk)
    size = None if chunk is ChunkRule.AUTO else chunk
    workload = replace(long, batch=batch, prefill_chunk=size)
    alone = experiment_with(LLAMA, fit.plan, topology, workload=workload)
    alone = alone.with_auto_chunk() if size is None else alone
    assert fit.memory == predicted_memory(alone)
    assert (fit.memory.fit is FitState.YES) == (batch <= fit.largest_batch)


def test_slices_that_no_plan_fills_are_named_with_the_reason() -> None:
    """28 heads take tp=4, and an odd batch no dp."""
    qwen = read_model("Qwen/Qwen2.5-7B-Instruct")
    fits, refused = slice_fits(qwen, parse_slices("v6e-4,v6e-8,cpu:8"), [WORKLOAD], batch=7)
    assert [fit.name for fit in fits] == ["v6e-4"]
    assert "tp=8 does not divide n_heads=28" in refused["v6e-8"]
    assert "HBM of cpu is unknown" in refused["cpu:8"]


@table
def test_slices_are_a_list_or_all_of_a_chip(text: str, names: list[str]) -> None:
    assert [topology.name for topology in parse_slices(text)] == names


def test_slices_reach_up_to_a_pod_and_cost_their_chips_or_their_price() -> None:
    slices = parse_slices("any")
    assert max(topology.n_chips for topology in slices) == 256
    assert {topology.chip.name for topology in slices} == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    (v5p, v6e) = parse_slices("v5p-16,v6e-16")
    prices = parse_prices("v6e=2.7,v5e=1.2")
    assert price_per_hour(v6e, None) == 16
    assert price_per_hour(v6e, prices) == pytest.approx(16 * 2.7)
    assert price_per_hour(v5p, prices) is None


SLICES = parse_slices("v6e-1,v6e-4,v6e-8,v5e-4,v5e-8,v5e-16")


space = partial(space_with, "Qwen/Qwen3-32B", "v6e-1", batch="1:64")


@cache
def meeting(slo: str) -> set[str]:
    """The slices that meet an objective, each searched on its own."""
    objective = objective_of(slo)
    searches = (search(replace(space(), topology=topology), objective) for topology in SLICES)
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


@pytest.mark.slow
def test_equally_cheap_slices_are_judged_by_the_goal() -> None:
    slices = parse_slices("v5e-8,v6e-8")
    for goal in Goal:
        result = search_slices(space(), slices, objective_of("ttft=5,tpot=0.1", goal))
        assert result.best.space.topology.chip.name == "v6e"
        assert [one.space.topology.chip.name for one in result.searches] == ["v5e", "v6e"]
        assert "\n".join(slice_lines(result)).split("\n")[2].startswith("v6e-8 ")


@pytest.mark.slow
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
    said = f"And {counted(n_left, 'more expensive slice')}, not searched: --topology names them."
    assert said in list(slice_lines(result))


@pytest.mark.slow
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
    every = {(c.tpot_s, result.token_prices(s, c).output) for s in result.searches for c in s.front}
    beaten = {x for x in every for y in every - {x} if y[0] <= x[0] and y[1] <= x[1]}
    assert [(c.tpot_s, of.output) for c, of in result.frontier()] == sorted(every - beaten)


def test_chips_without_a_price_are_left_out_and_named() -> None:
    result = search_slices(space(), SLICES, objective_of("ttft=5"), parse_prices("v6e=2.7"))
    assert {r.space.topology.chip.name for r in result.searches} == {"v6e"}
    assert result.unpriced == ("v5e",)
    with pytest.raises(SpecError, match=r"no price of v6e, v5e.*Add v6e=PRICE"):
        search_slices(space(), SLICES, objective_of("ttft=5"), parse_prices("v4=3"))


@pytest.mark.slow
@table
def test_no_candidate_is_faster_than_the_peak_rates_allow(model, topology, dtypes, batch) -> None:
    dtypes = dtypes or [read_model(model).default_weight_dtype]
    workload, batches = Workload(prompt=256, output=16), Batches(least=batch, most=64)
    sizes = {"cache_dtypes": ("bf16",), "workload": workload, "batches": batches}
    one = space_with(model, topology, dtypes=dtypes, **sizes)
    grid = grid_of(one)
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


def test_the_columns_of_slices_are_apart_and_the_answer_is_first() -> None:
    """Names of large slices and prices of more than eight letters."""
    slices, prices = parse_slices("v6e-256"), parse_prices("v6e=123456")
    result = search_slices(space(batch="64"), slices, objective_of(None), prices)
    head, columns, row, *_ = slice_lines(result)
    assert head == "best: v6e-256, 31,604,736.00 an hour"
    assert columns.split()[:3] == ["slice", "an", "hour"]
    assert row.split()[:2] == ["v6e-256", "31,604,736.00"]
    small = space_with("Qwen/Qwen3-4B", "v6e-1", batch="1")
    result = search_slices(small, parse_slices("v6e-1"), objective_of(None))
    assert next(slice_lines(result)) == "cheapest: v6e-1, 1 chip"


QWEN = {"topology": "v6e-8", "plan": "tp=8", "prompt": 1024, "output": 128}


def test_list_prices_have_a_date_and_a_source() -> None:
    assert parse_prices(LIST) == LIST_PRICES
    assert re.search(r"list prices on demand of 20\d\d-\d\d-\d\d \(\S+", LIST_NOTE)


def test_input_and_output_tokens_pay_for_the_slice() -> None:
    served = meshscope.serve_sim("Qwen/Qwen3-8B", max_concurrency=16, prices="v6e=2.7", **QWEN)
    prices, figures = served.token_prices, served.outcome.result.figures
    assert prices is not None
    assert min(prices.input, prices.output) > 0
    dollars_per_s = 8 * 2.7 / 3600
    paid = prices.input * figures.requests_per_s * 1024
    paid += prices.output * figures.output_tokens_per_s
    assert paid / 1e6 == pytest.approx(dollars_per_s)


def test_a_chip_without_a_price_has_no_cost_and_is_named() -> None:
    served = meshscope.serve_sim("Qwen/Qwen3-8B", rate=1, requests=20, prices="v5e=1.2", **QWEN)
    assert served.token_prices is None
    assert "no price of v6e is given" in str(served)
    assert served.as_dict()["token_prices"] is None


def test_a_run_of_a_sweep_has_the_price_of_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"batch": 8, "prompt": 1000, "output": 100, "ttft_s": 0.1, "e2e_s": 0.4}
    rows = [{"topology": name, **sizes} for name in ("v6e:2x2", "h100:4")]
    note_prices(rows, {"v6e": 2.7}, is_list=True)
    dollars_per_s, prices = 4 * 2.7 / 3600, rows[0]["token_prices"]
    assert prices["input"] == pytest.approx(1e6 * dollars_per_s * 0.1 / 8000)
    assert prices["output"] == pytest.approx(1e6 * dollars_per_s * 0.3 / 800)
    assert rows[1]["token_prices"] is None
    said = capsys.readouterr().err
    assert "no price of h100 is given" in said
    assert LIST_NOTE in said


def test_a_search_splits_the_price_by_the_time_of_prefill() -> None:
    best = meshscope.plan("Qwen/Qwen3-8B", topology="v6e-4", batch=8, prices=LIST)
    assert best.slices is not None
    prices, winner = best.slices.token_prices(best.search), best.winner
    whole = best.slices.price_per_million(best.search)
    assert prices is not None
    assert winner is not None
    workload = winner.experiment.workload
    paid = prices.input * workload.prompt + prices.output * workload.output
    assert paid == pytest.approx(whole * workload.output)
    share = prices.input * workload.prompt / paid
    assert share == pytest.approx(winner.ttft_s / winner.e2e_s)
