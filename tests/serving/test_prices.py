"""Prices of chips and tokens: list prices, and input and output tokens that pay for the whole slice together."""

import re

import pytest

import meshscope
from meshscope.api.sweep import note_prices
from meshscope.serving.prices import LIST, LIST_NOTE, LIST_PRICES, parse_prices

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
