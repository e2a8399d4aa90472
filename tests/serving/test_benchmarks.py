"""Files of benchmark tools: read, compared with a simulation, and refused with a reason.

The files in benchmark_files were written by the named releases against experiments/benchmark_files/server.py.
"""

import gzip
import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tables import table
from tests.cli.conftest import words_of

from meshscope.errors import MissingToolError, ParseError
from meshscope.serving.benchmarks import read_bench

FILES = Path(__file__).parent / "benchmark_files"
MODEL = "Qwen/Qwen3-8B"
OF_SERVER = "--topology v6e-1 --plan tp=1"
SERVE = {
    "completed": 60, "total_input_tokens": 60 * 512, "total_output_tokens": 60 * 32, "request_rate": "inf",
    "max_concurrency": 8, "median_ttft_ms": 90.0, "median_tpot_ms": 12.5, "median_itl_ms": 12.0,
    "p99_itl_ms": 20.0, "output_throughput": 600.0,
}  # fmt: skip


def unpacked(name: str, folder: Path = Path()) -> Path:
    """The file with this name in a folder."""
    path = folder / name
    path.write_bytes(gzip.decompress((FILES / f"{name}.gz").read_bytes()))
    return path


@table
def test_a_file_of_a_released_tool(
    tmp_path: Path, name: str, writer: str, requests: int, times_ms: list[float]
) -> None:
    bench = read_bench(unpacked(name, tmp_path))
    assert (bench.n_requests, bench.n_failed, bench.prompt % 64) == (requests, 0, 0)
    assert bench.writer == writer
    medians_ms = [1e3 * bench.times_s[key]["p50"] for key in ("ttft", "tpot")]
    assert medians_ms == pytest.approx(times_ms, rel=5e-3)


def test_vllm_and_sglang_share_keys(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps(SERVE | {"model_id": MODEL}))
    bench = read_bench(path)
    assert (bench.writer, bench.model, bench.rate_per_s) == ("vllm bench serve", MODEL, None)
    assert (bench.prompt, bench.output, bench.itl_s) == (512, 32, 0.012)
    server = {"server_info": {"model_path": MODEL, "tp_size": 4}}
    path.write_text("\n".join(json.dumps(SERVE | server | {"max_concurrency": n}) for n in (4, 8)))
    bench = read_bench(path)  # one line a run; the last one counts
    assert (bench.writer, bench.model, bench.plan) == ("sglang.bench_serving", MODEL, "tp=4")
    assert bench.max_concurrency == 8


def test_samples_give_the_statistics_that_a_summary_lacks(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    details = {"ttfts": [0.1 * i for i in range(11)], "itls": [[0.01, 0.03], [0.02]]}
    path.write_text(json.dumps(SERVE | details | {"mean_e2e_latency_ms": 900.0}))
    assert read_bench(path).times_s == {
        "ttft": pytest.approx({"mean": 0.5, "p50": 0.09, "p90": 0.9, "p99": 0.99}),
        "tpot": {"p50": 0.0125},
        "itl": pytest.approx({"mean": 0.02, "p50": 0.012, "p90": 0.028, "p99": 0.02}),
        "e2e": {"mean": 0.9},
    }


@table
def test_another_file_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ParseError) as error:
        read_bench(path)
    assert message in str(error.value)


@pytest.mark.slow
def test_measured_beside_served_beside_device(meshscope) -> None:
    path = unpacked("guidellm-0.8.1.json")
    status, out, _ = meshscope(*words_of(f"compare {path} {OF_SERVER}"))
    lines = out.splitlines()
    assert (status, len(lines) <= 12, max(map(len, lines)) <= 80) == (0, True, True)
    assert lines[0].startswith("Qwen/Qwen3-8B on v6e:1x1 tp=1: GuideLLM 0.8.1, 4 requests")
    assert "bound by the device" in out
    assert "ideal engine" in out


@pytest.mark.slow
@table
def test_a_contradiction_is_refused(meshscope, options: str, message: str) -> None:
    unpacked("guidellm-0.8.1.json")
    status, out, err = meshscope(*words_of(f"compare guidellm-0.8.1.json {options}"))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert message in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    ["--weight-dtype int8", "--cache-dtype int8", "--max-sequences 1", "--max-step-tokens 256",
     "--host-overhead 0.01", "--server vllm-tpu", "--separate-steps"],
)  # fmt: skip
def test_an_option_of_the_server_changes_what_is_simulated(meshscope, option: str) -> None:
    Path("b.json").write_text(json.dumps(SERVE | {"model_id": MODEL}))
    line = f"compare b.json {OF_SERVER} --json"
    served = [
        json.loads(meshscope(*words_of(one)).out)["simulation"]
        for one in (line, f"{line} {option}")
    ]
    assert (
        served[0]["figures"] != served[1]["figures"] or served[0]["policy"] != served[1]["policy"]
    )


@pytest.mark.slow
def test_a_simulation_is_a_benchmark_report(meshscope) -> None:
    line = "serve-sim Qwen/Qwen3-8B --topology v6e-4 --plan tp=4 --rate 4 --requests 50"
    served = json.loads(meshscope(*words_of(f"{line} --out x.br.yaml --json")).out)["figures"]
    # llm-d/llm-d-benchmark@8bc9f1dd, llmdbenchmark/analysis/benchmark_report.
    schema = gzip.decompress((FILES / "br_v0_2_1_json_schema.json.gz").read_bytes())
    jsonschema.validate(yaml.safe_load(Path("x.br.yaml").read_text()), json.loads(schema))
    bench = read_bench(Path("x.br.yaml"))
    assert (bench.model, bench.n_chips, bench.plan, bench.n_requests) == (MODEL, 4, "tp=4", 50)
    for name, times in bench.times_s.items():
        assert times == {what.removesuffix("_s"): s for what, s in served[name].items()}


def exposition(server: str = "vllm", *, n: int = 40, running: int = 8, model: str = MODEL) -> str:
    """What a server exports after `n` requests of 512 and 32 tokens: 90 ms to the first, 12 ms between tokens."""
    registry = CollectorRegistry()
    buckets = (0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
    for name, seconds in (
        ("time_to_first_token_seconds", 0.09),
        ("inter_token_latency_seconds", 0.012),
        ("e2e_request_latency_seconds", 0.46),
    ):
        histogram = Histogram(
            f"{server}:{name}", name, ["model_name", "engine"], buckets=buckets, registry=registry
        )
        for number in range(n):
            histogram.labels(model, str(number % 2)).observe(seconds)
    for name, tokens in (("prompt_tokens", 512), ("generation_tokens", 32)):
        Counter(f"{server}:{name}", name, ["model_name"], registry=registry).labels(model).inc(
            n * tokens
        )
    name = "num_requests_running" if server == "vllm" else "num_running_reqs"
    Gauge(f"{server}:{name}", name, ["model_name"], registry=registry).labels(model).set(running)
    return generate_latest(registry).decode()


@pytest.mark.parametrize(("server", "writer"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_metrics_of_a_server_are_a_benchmark(tmp_path: Path, server: str, writer: str) -> None:
    path = tmp_path / "metrics.prom"
    path.write_text(exposition(server))
    bench = read_bench(path)
    assert (bench.writer, bench.model, bench.n_requests) == (f"metrics of {writer}", MODEL, 40)
    assert (bench.prompt, bench.output, bench.max_concurrency, bench.rate_per_s) == (
        512,
        32,
        8,
        None,
    )
    # Prometheus: linear inside the bucket from 50 to 100 ms, which has all observations.
    assert bench.times_s["ttft"] == pytest.approx(
        {"mean": 0.09, "p50": 0.075, "p90": 0.095, "p99": 0.0995}
    )
    assert bench.times_s["itl"] == pytest.approx(
        {"mean": 0.012, "p50": 0.015, "p90": 0.019, "p99": 0.0199}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (exposition(n=0), "no request was completed"),
        (exposition(running=0), "no request is in flight"),
        (exposition() + exposition(model="other"), "it has several models"),
        ("# HELP vllm:x y\nvllm:x{le=", "damaged or cut short. Scrape the server again"),
        (re.sub("(e2e.*count.*) .*", r"\1 +Inf", exposition()), "metrics of a server, and cannot"),
        ("# HELP up y\nup 1\n", "not one whole JSON or YAML document"),
    ],
)
def test_metrics_that_say_nothing_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "metrics.prom"
    path.write_text(text)
    with pytest.raises(ParseError, match=message):
        read_bench(path)


def test_metrics_need_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.prom"
    path.write_text(exposition())
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    with pytest.raises(MissingToolError, match=r"meshscope\[prometheus\]"):
        read_bench(path)
