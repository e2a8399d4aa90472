"""Latency of requests, against worked examples and numpy."""

import numpy as np
import pytest

from meshscope.analysis.request import latency_of, percentile, spread_of
from meshscope.events.measured import Request

REQUESTS = (
    Request(prefill_s=1.0, decode_s=(0.1, 0.3)),
    Request(prefill_s=3.0, decode_s=(0.2, 0.2)),
)


def test_latency_of_a_worked_example() -> None:
    latency = latency_of(REQUESTS, batch=4, prompt=8)
    assert latency.ttft.mean_s == pytest.approx(2.0)
    assert latency.e2e.mean_s == pytest.approx(2.4)
    assert latency.tpot is not None
    assert (latency.tpot.mean_s, latency.tpot.n) == (pytest.approx(0.2), 2)
    assert latency.itl is not None
    assert (latency.itl.p50_s, latency.itl.n) == (pytest.approx(0.2), 4)
    assert latency.output_tokens_per_s == pytest.approx(4 * 3 / 2.4)
    assert latency.prefill_tokens_per_s == pytest.approx(4 * 8 / 2.0)
    assert latency.decode_tokens_per_s == pytest.approx(4 * 2 / 0.4)


def test_a_request_of_one_token_has_no_latency_between_tokens() -> None:
    latency = latency_of((Request(prefill_s=1.0, decode_s=()),), batch=2, prompt=8)
    assert (latency.itl, latency.tpot, latency.decode_tokens_per_s) == (None, None, None)
    assert latency.output_tokens_per_s == pytest.approx(2.0)


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_percentiles_are_those_of_numpy(n: int) -> None:
    values = np.random.default_rng(n).random(n).tolist()
    spread = spread_of(values)
    expected = np.percentile(values, [50, 90, 95, 99])
    assert [spread.p50_s, spread.p90_s, spread.p95_s, spread.p99_s] == pytest.approx(
        expected.tolist()
    )
    assert percentile(sorted(values), 1.0) == max(values)
