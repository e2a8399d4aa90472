"""Prometheus text that a vLLM or SGLang server exports: its load and the times that it measured.

Counters and histograms are totals since the server started, over all its engines. Quantiles are linear inside a
bucket, as Prometheus' `histogram_quantile` has them; one beyond the last bucket is unknown. A file has no clock, so
the load is the number of requests in flight at the scrape.
"""

import re
from collections import Counter
from importlib import import_module
from math import inf
from typing import Any, NamedTuple

from meshscope.errors import MissingToolError

IS_METRICS = re.compile(r"(?m)\A\s*(?:#|(?:vllm|sglang):)[^\n]*$(?s:.*?)^(?:vllm|sglang):")
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Older servers have the second name.
_TIMES = {
    "ttft": ("time_to_first_token_seconds",),
    "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "tpot": ("request_time_per_output_token_seconds",),
    "e2e": ("e2e_request_latency_seconds",),
}
_IN_FLIGHT = (  # that run, and that wait
    *("num_requests_running", "num_running_reqs"),
    *("num_requests_waiting", "num_queue_reqs"),
)
_TOKENS = {"prompt": "prompt_tokens_total", "output": "generation_tokens_total"}


class _Totals(NamedTuple):
    """Samples of one server, summed over its engines; buckets are cumulative, by their upper end."""

    values: Counter[str]
    buckets: dict[str, Counter[float]]
    models: set[str]


def read_metrics(text: str) -> dict[str, Any]:
    """The fields of a benchmark's result; ValueError if the server has not served a load, or serves several models.

    MissingToolError without prometheus_client.
    """
    server, totals = _totals(text)
    values = totals.values
    n_requests = round(values["e2e_request_latency_seconds_count"])
    running = sum(values[name] for name in _IN_FLIGHT)
    if n_requests < 1:
        raise ValueError("no request was completed. Scrape the server after a load")
    if running < 1:
        raise ValueError("no request is in flight. Scrape the server while it is under its load")
    times = {
        name: seconds
        for name, keys in _TIMES.items()
        if (seconds := next(filter(None, (_times(totals, key) for key in keys)), None))
    }
    return {
        "writer": f"metrics of {server}",
        "n_requests": n_requests,
        **{name: round(values[key] / n_requests) for name, key in _TOKENS.items()},
        "rate_per_s": None,
        "max_concurrency": round(running),
        "model": next(iter(totals.models), None),
        "times_s": times,
    }


def _totals(text: str) -> tuple[str, _Totals]:
    try:
        parse = import_module("prometheus_client.parser").text_string_to_metric_families
    except ImportError as error:
        needed = "the metrics of a server need prometheus_client"
        raise MissingToolError.of_extra(needed, "prometheus") from error
    servers: dict[str, _Totals] = {}
    try:
        for sample in (one for family in parse(text) for one in family.samples):
            server, _, name = sample.name.partition(":")
            totals = servers.setdefault(server, _Totals(Counter(), {}, set()))
            if model := sample.labels.get("model_name"):
                totals.models.add(model)
            if name.endswith("_bucket"):
                of_name = totals.buckets.setdefault(name.removesuffix("_bucket"), Counter())
                of_name[float(sample.labels["le"])] += sample.value
            else:
                totals.values[name] += sample.value
        server = next(name for name in servers if name in {"vllm", "sglang"})
    except (ValueError, LookupError, StopIteration) as error:
        raise ValueError("its text is damaged or cut short. Scrape the server again") from error
    totals = servers[server]
    if len(totals.models) > 1:
        names = ", ".join(sorted(totals.models))[:200]
        raise ValueError(f"it has several models: {names}. Keep the lines of one")
    return {"vllm": "vLLM", "sglang": "SGLang"}[server], totals


def _times(totals: _Totals, key: str) -> dict[str, float]:
    """Mean and quantiles of a histogram in seconds; empty without observations."""
    n = totals.values[f"{key}_count"]
    if n <= 0:
        return {}
    bounds = sorted(totals.buckets.get(key, ()))
    times = {"mean": totals.values[f"{key}_sum"] / n}
    for name, frac in _QUANTILES.items():
        low_s = below = 0.0
        for bound in bounds:
            within = totals.buckets[key][bound]
            if within >= frac * n:
                if bound < inf and within > below:
                    times[name] = low_s + (bound - low_s) * (frac * n - below) / (within - below)
                break
            low_s, below = bound, within
    return times
