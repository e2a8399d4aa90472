"""Plans under several loads: the knee, the best plan by load, and what would settle equal ones."""

from pathlib import Path

import numpy as np
import pytest
from constant_server import ROOMY, at_once, placed, pool
from tables import table

import meshscope
from meshscope.errors import SpecError
from meshscope.reports.loads import load_lines
from meshscope.serving.engine import EnginePolicy
from meshscope.serving.loads import LoadTable, load_table, parse_loads, sharding_table
from meshscope.serving.objective import Objective
from meshscope.serving.servers import serving_engine
from meshscope.serving.simulation import PlacedPool, served_whole

QWEN = {"topology": "v6e-8", "prompt": 1024, "output": 32}
MOST = 8  # sequences of the constant server


@table
def test_loads_are_numbers_lists_and_ranges(text: str, expected: list[float]) -> None:
    assert parse_loads(text, "--rate", least=0.1, most=1000) == tuple(expected)


@table
def test_other_loads_are_refused(text: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        parse_loads(text, "--concurrency", least=1, most=1024, is_whole=True)


def constant_table(*loads: float) -> LoadTable:
    policy = EnginePolicy(max_sequences=MOST, max_step_tokens=1_000_000)
    one = PlacedPool(experiment=placed(), n_instances=1, pool=pool(policy, ROOMY))
    return load_table(
        [one], loads, lambda n: at_once(40 * int(n), output=200), Objective(), is_closed=True
    )


def test_the_knee_of_a_server_is_where_it_is_full() -> None:
    """Steps take the same time for any number of sequences, so rates grow up to MOST in flight, times beyond."""
    result = constant_table(1, 2, 4, MOST, 2 * MOST, 4 * MOST)
    assert result.winner.knee.load == MOST
    rates = [row.best.figures.output_tokens_per_s for row in result.rows]
    assert rates[4:] == pytest.approx([rates[3]] * 2, rel=0.03)


def test_a_closed_loop_keeps_its_requests_in_flight() -> None:
    for point in constant_table(1, 4, MOST).winner.points:
        assert point.n_in_flight == pytest.approx(point.load, rel=0.05)


def test_engines_share_requests_in_flight_unequally() -> None:
    load = at_once(30, output=5)
    requests, engines = served_whole(load, pool(n_engines=2), max_concurrency=3)
    assert np.isfinite(requests.finish_s).all()
    assert [one.n_free for one in engines] == [ROOMY.n_blocks] * 2


def shardings(objective: Objective, *loads: float) -> LoadTable:
    experiments = [
        placed("v6e:2x4", plan, "Qwen/Qwen3-8B")
        for plan in ("tp=8", "dp=2,tp=4", "dp=8", "tp=8,sp", "pp=2,tp=4", "cp=2,tp=4")
    ]
    return sharding_table(experiments, loads, objective, server=serving_engine("vllm-tpu"))


def test_the_best_plan_of_each_load_serves_the_most_tokens() -> None:
    result = shardings(Objective(), 1, 64)
    assert [curve.plan for curve in result.curves] == ["tp=8", "dp=2,tp=4", "dp=8"]
    for at, row in enumerate(result.rows):
        rates = [curve.points[at].figures.output_tokens_per_s for curve in result.curves]
        assert row.best.figures.output_tokens_per_s == max(rates)
        assert [one.figures.output_tokens_per_s for _, one in row.ranked] == sorted(rates)[::-1]


def test_equal_plans_name_the_cheapest_measurements() -> None:
    result = shardings(Objective(), 1, 4, 16, 32, 64, 128)
    equal = [row for row in result.rows if row.n_equal]
    costs = [one.chip_s for one in result.measurements()]
    assert len(costs) == min(3, len(equal))
    assert costs == sorted(costs)
    assert all(one.load in {row.load for row in equal} for one in result.measurements())


def test_the_table_has_twelve_lines_of_eighty_columns() -> None:
    lines = list(load_lines(shardings(Objective(tpot_s=0.03), *range(1, 21))))
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 80


def test_several_loads_show_the_knee() -> None:
    several = meshscope.serve_sim(
        "Qwen/Qwen3-8B", plan="tp=8/dp=2,tp=4", max_concurrency="1,8,64", **QWEN
    )
    assert several.table is not None
    knee = several.table.winner.knee
    assert several.outcome.result.figures == knee.figures
    document = several.as_dict()["loads"]
    assert [row["load"] for row in document["rows"]] == [1, 8, 64]
    assert document["knee"]["load"] == knee.load


@table
def test_loads_that_exclude_each_other_are_refused(options: dict[str, str], remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        meshscope.serve_sim("Qwen/Qwen3-8B", **{"plan": "tp=8", **QWEN, **options})


def test_a_prediction_has_what_a_server_delivers(tmp_path: Path) -> None:
    """As `serve-sim` simulates the same load."""
    run = meshscope.predict("Qwen/Qwen3-8B", plan="tp=8", batch=4, server="vllm-tpu", **QWEN)
    served = run.record.manifest.served
    assert served is not None
    options = {"max_concurrency": 4, "requests": 64, "server": "vllm-tpu"}
    figures = meshscope.serve_sim("Qwen/Qwen3-8B", plan="tp=8", **QWEN, **options)
    expected = figures.outcome.result.figures
    assert expected.ttft is not None
    assert served.ttft_s == expected.ttft.p50_s
    assert served.output_tokens_per_s == expected.output_tokens_per_s
    assert run.as_dict()["served"]["server"] == "vllm-tpu@2026.08"
    load, figures = str(served).split(": ")
    assert load == "4 in flight"
    assert f"as served {figures}" in " ".join(run.text().split())
    assert meshscope.open(run.save(tmp_path / "run").path).record.manifest.served == served


def test_the_frontier_has_the_points_that_no_other_beats_in_both() -> None:
    served = meshscope.serve_sim(
        "Qwen/Qwen3-32B", topology="v6e-8", plan="tp=8/dp=2,tp=4", max_concurrency=[1, 16, 128]
    )
    assert served.table is not None
    points = [
        (1 / one.figures.tpot.p50_s, one.figures.output_tokens_per_s / 8)
        for curve in served.table.curves
        for one in curve.points
        if one.figures.tpot is not None
    ]
    best = {p for p in points if not any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in points)}
    frontier = served.table.frontier()
    assert {(p.tokens_per_s_per_user, p.tokens_per_s_per_chip) for p in frontier} == best
    assert 1 < len(frontier) < 6
    lines = list(load_lines(served.table, is_full=True, prices={"v6e": 3.6}))
    (first,) = [line for line in lines if line.endswith(f"{frontier[0].plan} at 1 in flight")]
    # 3.6 dollars per hour are 0.001 per second.
    assert f"{1e3 / frontier[0].tokens_per_s_per_chip:,.3g}" in first
