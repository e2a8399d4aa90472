"""Results of serving benchmarks: what vLLM and SGLang save."""

import json
from pathlib import Path

import pytest

from meshscope.errors import TraceError
from meshscope.readers.traces.servers import read_served

VLLM = {
    "completed": 200, "request_throughput": 12.65, "output_throughput": 1619.2,
    "mean_ttft_ms": 81.25, "median_ttft_ms": 70.5, "p99_ttft_ms": 210.0,
    "mean_tpot_ms": 9.0, "median_tpot_ms": 8.5, "p99_tpot_ms": 14.0,
    "mean_itl_ms": 9.5, "median_itl_ms": 8.75, "p99_itl_ms": 21.0,
}  # fmt: skip


def test_latencies_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(VLLM))
    served = read_served(path)
    assert (served.n_requests, served.requests_per_s) == (200, 12.65)
    times = {t.name: (t.mean_s, t.p50_s, t.p90_s, t.p99_s) for t in served.times}
    assert times == {
        "ttft": pytest.approx((0.08125, 0.0705, None, 0.21)),
        "tpot": pytest.approx((0.009, 0.0085, None, 0.014)),
        "itl": pytest.approx((0.0095, 0.00875, None, 0.021)),
    }


def test_details_give_the_percentiles_that_the_summary_lacks(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    details = {"ttfts": [0.1 * i for i in range(11)], "itls": [[0.01, 0.03], [0.02]]}
    path.write_text(json.dumps({**VLLM, **details}))
    times = {t.name: t for t in read_served(path).times}
    assert times["ttft"].p90_s == pytest.approx(0.9)
    assert times["itl"].p90_s == pytest.approx(0.028)
    assert times["ttft"].p99_s == pytest.approx(0.21)
    assert times["tpot"].p90_s is None


def test_the_last_line_of_sglang_counts(tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    rows = [{"mean_ttft_ms": 1.0}, {"mean_ttft_ms": 2.0, "mean_e2e_latency_ms": 900.0}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert {t.name: t.mean_s for t in read_served(path).times} == {"ttft": 0.002, "e2e": 0.9}


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"mean_ttft_ms": "fast"}', "{" * 5000])
def test_what_is_no_benchmark_is_one_message(tmp_path: Path, content: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(TraceError, match="Give the JSON of `vllm bench serve"):
        read_served(path)
