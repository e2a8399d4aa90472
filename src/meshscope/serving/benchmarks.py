"""Results of benchmark tools, and metrics of servers: what was sent, to which model, and the times that were measured.

Times have one meaning here. TTFT ends with the first token. TPOT is the mean time between the tokens of a
request, which AIPerf and GuideLLM call inter-token latency. ITL is every time between two tokens.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meshscope.errors import ParseError
from meshscope.files import read_text
from meshscope.serialize import picked
from meshscope.serving.load import Load, random_load
from meshscope.serving.server_metrics import IS_METRICS, read_metrics

Document = Mapping[str, Any]
REMEDY = (
    "Give a result of vllm bench serve, sglang.bench_serving, AIPerf or GuideLLM, a Benchmark Report 0.2.1, or "
    "the Prometheus text of a vLLM or SGLang server."
)
_STATISTICS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """A benchmark: mean lengths, arrivals, and measured times by name; None for what the file lacks.

    `times_s` has mean, p50, p90 and p99 of ttft, tpot, itl and e2e, as far as they are known.
    """

    writer: str
    n_requests: int
    prompt: int
    output: int
    rate_per_s: float | None  # None: all at once, or limited by max_concurrency
    burstiness: float = 1.0
    max_concurrency: int | None = None
    model: str | None = None
    n_chips: int | None = None
    plan: str | None = None
    n_failed: int | None = None
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    times_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def itl_s(self) -> float:
        """The median time between two tokens, else the median of the means of requests; ParseError without both."""
        for name in ("itl", "tpot"):
            if (median_s := self.times_s.get(name, {}).get("p50")) is not None:
                return median_s
        raise ParseError(
            f"the result of {self.writer} has no time between tokens. Record it with streaming."
        )

    def load(self) -> Load:
        """Requests of mean lengths with gaps of the benchmark's distribution."""
        sizes = picked(self, "rate_per_s", "n_requests", "prompt", "output")
        return random_load(self.burstiness, **sizes)


def read_bench(path: Path) -> BenchResult:
    """The result in a file of a known tool; ParseError for another file, or one cut short."""
    text = read_text(path, REMEDY)
    if IS_METRICS.search(text):
        try:
            return _checked(BenchResult(**read_metrics(text)))
        except (ArithmeticError, ValueError) as error:
            raise ParseError(f"{path}: metrics of a server, and {error}.") from error
    documents = _documents(text, path)
    document = documents[-1]
    for name, (reads, read) in _READERS.items():
        if reads(document):
            try:
                return _checked(read(documents if read is _aiperf_records else document))
            except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
                what = f"has no {error}" if isinstance(error, KeyError) else str(error)
                raise ParseError(
                    f"{path}: looks like a {name}, and {what}. Save the whole result of a run that completed requests."
                ) from error
    keys = ", ".join(sorted(map(str, document))[:4]) or "none"
    raise ParseError(f"{path}: no benchmark result that is known (its keys: {keys}). {REMEDY}")


def _documents(text: str, path: Path) -> list[Document]:
    """The document of a file, or one of each line."""
    try:
        if path.suffix in {".yaml", ".yml"}:
            documents = [yaml.safe_load(text)]
        else:
            try:
                documents = [json.loads(text)]
            except json.JSONDecodeError:
                documents = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        first = str(error).splitlines()[0]
        raise ParseError(
            f"{path}: not one whole JSON or YAML document ({first}). The file may be cut short: save the "
            "result again."
        ) from error
    if not documents or not all(isinstance(one, dict) for one in documents):
        raise ParseError(f"{path}: no benchmark result: not an object. {REMEDY}")
    return documents


def _checked(bench: BenchResult) -> BenchResult:
    if bench.times_s.get("itl", {}).get("p50") == 0:  # messages carry several tokens
        bench = replace(bench, times_s={k: v for k, v in bench.times_s.items() if k != "itl"})
    if bench.n_requests < 1:
        raise ValueError(f"no request was completed, {bench.n_failed or 0} failed")
    if bench.output < 2:
        raise ValueError("requests have one output token, so no time is between tokens")
    if not bench.times_s:
        raise ValueError("no latency is in it")
    numbers = [bench.prompt, bench.output, bench.rate_per_s or 1.0, bench.burstiness]
    numbers += [bench.max_concurrency or 1]
    numbers += [s for times in bench.times_s.values() for s in times.values()]
    if not all(isfinite(one) and one > 0 for one in numbers):
        raise ValueError("a figure is not positive")
    return bench


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _serve(document: Document) -> BenchResult:
    """The JSON of `vllm bench serve`, or a line of `sglang.bench_serving`, which share most keys."""
    n, rate = int(document["completed"]), document.get("request_rate")
    if not n:
        raise ValueError(f"no request was completed, {document.get('failed') or 0} failed")
    is_vllm = "server_info" not in document and "model_id" in document
    times_s = {name: _serve_times(document, *keys) for name, keys in _SERVE_TIMES.items()}
    server = document.get("server_info") or {}
    tp = document.get("tensor_parallel_size") or server.get("tp_size")
    return BenchResult(
        writer="vllm bench serve" if is_vllm else "sglang.bench_serving",
        n_requests=n,
        n_failed=_count(document.get("failed")),
        prompt=round(document["total_input_tokens"] / n),
        output=round(document["total_output_tokens"] / n),
        rate_per_s=None if rate is None or not isfinite(float(rate)) else float(rate),
        burstiness=float(document.get("burstiness") or 1.0),
        max_concurrency=_count(document.get("max_concurrency")),
        model=document.get("model_id") or server.get("model_path"),
        plan=None if tp is None else f"tp={int(tp)}",
        requests_per_s=document.get("request_throughput"),
        output_tokens_per_s=document.get("output_throughput"),
        times_s={name: times for name, times in times_s.items() if times},
    )


# Latencies: their names in the keys of a file, by vLLM and SGLang, and the key of their samples.
_SERVE_TIMES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "ttft": (("ttft",), "ttfts"),  # of each request
    "tpot": (("tpot",), None),
    "itl": (("itl",), "itls"),  # lists over tokens
    "e2e": (("e2el", "e2e_latency"), None),
}


def _serve_times(
    document: Document, keys: tuple[str, ...], samples_key: str | None
) -> dict[str, float]:
    """The statistics in seconds; the samples of `--save-detailed` have those that the summary lacks."""
    listed = document.get(samples_key or "") or ()
    samples = [float(s) for one in listed for s in (one if isinstance(one, list) else [one])]
    times: dict[str, float] = {}
    for what in _STATISTICS:
        word = "median" if what == "p50" else what
        given = next((ms for key in keys if (ms := document.get(f"{word}_{key}_ms"))), None)
        if given is not None:
            times[what] = given / 1e3
        elif samples:
            is_mean = what == "mean"
            times[what] = float(
                np.mean(samples) if is_mean else np.percentile(samples, int(what[1:]))
            )
    return times


_AIPERF_TIMES = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "itl": "inter_chunk_latency",
    "e2e": "request_latency",
}
_PER_S = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0, "sec": 1.0, "s/token": 1.0, "ms/token": 1e3}


def _aiperf(document: Document) -> BenchResult:
    """The profile_export_aiperf.json of AIPerf."""
    config = document.get("input_config") or {}
    items = (config.get("models") or {}).get("items") or [{}]
    phase = (config.get("phases") or [{}])[-1]
    times = {
        name: _times(document[key], {"mean": "avg"}, _PER_S[document[key]["unit"]])
        for name, key in _AIPERF_TIMES.items()
        if document.get(key)
    }
    return BenchResult(
        writer=f"AIPerf {document.get('aiperf_version', '')}".rstrip(),
        n_requests=int(document["request_count"]["avg"]),
        n_failed=int((document.get("error_request_count") or {"avg": 0})["avg"]),
        prompt=round(document["input_sequence_length"]["avg"]),
        output=round(document["output_sequence_length"]["avg"]),
        rate_per_s=phase.get("rate"),
        max_concurrency=_count(phase.get("concurrency")),
        model=items[0].get("name"),
        output_tokens_per_s=(document.get("output_token_throughput") or {}).get("avg"),
        times_s=times,
    )


def _aiperf_records(documents: list[Document]) -> BenchResult:
    """The profile_export.jsonl of AIPerf: one request a line; its arrivals come from its requests."""
    done = [one["metrics"] for one in documents if not one.get("error")]
    if not done:
        raise ValueError(f"no request was completed, {len(documents)} failed")

    def values(key: str) -> Any:
        every = [one[key] for one in done if key in one]
        flat = [v for one in every for v in np.atleast_1d(one["value"])]
        return np.array(flat) / (_PER_S.get(every[0]["unit"], 1.0) if every else 1.0)

    times: dict[str, dict[str, float]] = {}
    for name, key in _AIPERF_TIMES.items():
        if len(seconds := values(key)):
            levels = np.quantile(seconds, (0.5, 0.9, 0.99)).tolist()
            times[name] = dict(zip(_STATISTICS, (float(seconds.mean()), *levels), strict=True))
    starts_s = np.sort([one["metadata"]["request_start_ns"] for one in documents]) / 1e9
    ends_s = max(one["metadata"]["request_end_ns"] for one in documents) / 1e9
    span_s, n_output = float(starts_s[-1] - starts_s[0]), values("output_sequence_length")
    return BenchResult(
        writer="AIPerf (records)",
        n_requests=len(done),
        n_failed=len(documents) - len(done),
        prompt=round(float(values("input_sequence_length").mean())),
        output=round(float(n_output.mean())),
        rate_per_s=(len(starts_s) - 1) / span_s if span_s > 0 else None,
        output_tokens_per_s=float(n_output.sum()) / (ends_s - float(starts_s[0])),
        times_s=times,
    )


def _guidellm(document: Document) -> BenchResult:
    """The benchmarks.json of GuideLLM, with one benchmark."""
    every = document["benchmarks"]
    if len(every) != 1:
        raise ValueError(f"{len(every)} benchmarks are in it, not one: keep one rate")
    metrics, config = every[0]["metrics"], every[0]["config"]
    strategy, totals = config["strategy"], metrics["request_totals"]
    names = {
        "ttft": ("time_to_first_token_ms", 1e3),
        "tpot": ("inter_token_latency_ms", 1e3),
        "e2e": ("request_latency", 1.0),
    }
    times = {
        name: _times({**one, **one["percentiles"]}, {}, per_s)
        for name, (key, per_s) in names.items()
        if (one := (metrics.get(key) or {}).get("successful")) and one["count"]
    }
    return BenchResult(
        writer=f"GuideLLM {document['metadata'].get('guidellm_version', '')}".rstrip(),
        n_requests=int(totals["successful"]),
        n_failed=int(totals["errored"]) + int(totals["incomplete"]),
        prompt=round(metrics["prompt_token_count"]["successful"]["mean"]),
        output=round(metrics["output_token_count"]["successful"]["mean"]),
        rate_per_s=strategy.get("rate"),
        max_concurrency=_count(strategy.get("streams")),
        model=config["backend"].get("model"),
        output_tokens_per_s=metrics["output_tokens_per_second"]["successful"]["mean"],
        times_s=times,
    )


_REPORT_TIMES = {
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "itl": "inter_token_latency",
    "e2e": "request_latency",
}


def _report(document: Document) -> BenchResult:
    """The Benchmark Report 0.2 or 0.2.1 of llm-d, which inference-perf writes, too."""
    if document["version"] not in {"0.2", "0.2.1"}:
        raise ValueError(f"its version is {document['version']}; 0.2 and 0.2.1 are read")
    aggregate = document["results"]["request_performance"]["aggregate"]
    scenario = document.get("scenario") or {}
    load = (scenario.get("load") or {}).get("standardized") or {}
    engines = [
        one["standardized"]
        for one in scenario.get("stack") or ()
        if one["standardized"].get("kind") == "inference_engine"
    ]
    engine = engines[0] if len(engines) == 1 else {}
    accelerator = engine.get("accelerator") or {}
    sizes = {k: v for k, v in (accelerator.get("parallelism") or {}).items() if v > 1}
    plan = ",".join(f"{k}={sizes[k]}" for k in ("dp", "pp", "tp", "ep") if k in sizes)
    requests, throughput = aggregate["requests"], aggregate.get("throughput") or {}
    n_failed = (requests.get("failures") or 0) + (requests.get("incomplete") or 0)
    concurrency = load.get("concurrency")
    rate = load.get("rate_qps") or (throughput.get("request_rate") or {}).get("mean")
    limit = concurrency if concurrency is not None and isfinite(concurrency) else None
    return BenchResult(
        writer=f"Benchmark Report {document['version']}",
        n_requests=requests["total"] - n_failed,
        n_failed=n_failed,
        prompt=round(requests["input_length"]["mean"]),
        output=round(requests["output_length"]["mean"]),
        rate_per_s=rate if limit is None else load.get("rate_qps"),
        max_concurrency=_count(limit),
        model=(engine.get("model") or {}).get("name"),
        n_chips=_count(accelerator.get("count")),
        plan=plan or None,
        output_tokens_per_s=(throughput.get("output_token_rate") or {}).get("mean"),
        times_s={
            name: _times(one, {}, _PER_S[one["units"]])
            for name, key in _REPORT_TIMES.items()
            if (one := (aggregate.get("latency") or {}).get(key))
        },
    )


def _times(statistics: Document, words: Mapping[str, str], per_s: float) -> dict[str, float]:
    """The statistics in seconds, by our names for them."""
    keys = {name: words.get(name, name) for name in _STATISTICS}
    return {
        name: float(statistics[key]) / per_s
        for name, key in keys.items()
        if statistics.get(key) is not None
    }


# By what a file is called: whether its document is one, and how it is read.
_READERS: dict[str, tuple[Callable[[Document], bool], Callable[[Any], BenchResult]]] = {
    "Benchmark Report": (lambda one: {"results", "version"} <= set(one), _report),
    "result of GuideLLM": (lambda one: {"benchmarks", "metadata"} <= set(one), _guidellm),
    "list of requests of AIPerf": (
        lambda one: {"metrics", "metadata"} <= set(one),
        _aiperf_records,
    ),
    "result of AIPerf": (
        lambda one: bool({"aiperf_version", "input_sequence_length"} & set(one)),
        _aiperf,
    ),
    "result of vllm bench serve or sglang.bench_serving": (
        lambda one: bool({"completed", "median_ttft_ms", "num_prompts"} & set(one)),
        _serve,
    ),
}
