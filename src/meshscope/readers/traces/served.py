"""Reads what `vllm bench serve` and SGLang's `bench_serving` save: TTFT, TPOT, ITL and E2E latency.

These are times of the client, queueing and network included. With `--save-detailed` the file has
every request, from which missing percentiles follow; without it, a percentile that the file lacks
is unknown.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshscope.errors import TraceError
from meshscope.events.measured import ServedBenchmark, ServedTime
from meshscope.files import read_file
from meshscope.readers.traces.json_stream import FAULTS

MAX_BYTES = 1 << 30
MS = 1e-3
# Latencies: their names in the keys of a file, by vLLM and SGLang, and the key of their samples.
_LATENCIES = (
    ("ttft", ("ttft",), "ttfts"),  # of each request
    ("tpot", ("tpot",), None),
    ("itl", ("itl",), "itls"),  # lists of those of each token
    ("e2e", ("e2el", "e2e_latency"), None),
)
_FIGURES = {"mean": ("mean",), "p50": ("median", "p50"), "p90": ("p90",), "p99": ("p99",)}


def read_served(path: Path) -> ServedBenchmark:
    """The benchmark in the file, the last one of several lines; TraceError if it is none."""
    try:
        data = read_file(path, MAX_BYTES)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}.") from error
    document = _document(data)
    times = (_time(document, *latency) for latency in _LATENCIES)
    known = tuple(time for time in times if time is not None)
    if not known:
        raise TraceError(
            f"{path}: has no latencies such as 'mean_ttft_ms'. Give the JSON of `vllm bench serve "
            "--save-result` or of `sglang.bench_serving`."
        )
    completed = document.get("completed")
    is_whole = isinstance(completed, int) and not isinstance(completed, bool) and completed >= 0
    return ServedBenchmark(
        path=str(path),
        n_requests=completed if is_whole else None,
        times=known,
        requests_per_s=_number(document.get("request_throughput")),
        output_tokens_per_s=_number(document.get("output_throughput")),
    )


def _document(data: bytes) -> Mapping[str, Any]:
    for text in (data, *data.strip().splitlines()[-1:]):
        try:
            document = msgspec.json.decode(text)
        except FAULTS:
            continue
        if isinstance(document, dict):
            return document
    return {}


def _time(
    document: Mapping[str, Any], name: str, keys: tuple[str, ...], samples_key: str | None
) -> ServedTime | None:
    """The latency in seconds, by its figures such as `median_ttft_ms`, else by its samples; None without any."""
    listed = document.get(samples_key or "")
    nested = (
        x if isinstance(x, list) else [x] for x in (listed if isinstance(listed, list) else ())
    )
    numbers = (number for part in nested for x in part if (number := _number(x)) is not None)
    samples = np.fromiter(numbers, np.float64)
    figures: dict[str, float | None] = {}
    for figure, words in _FIGURES.items():
        given = (_number(document.get(f"{word}_{key}_ms")) for key in keys for word in words)
        value = next((v * MS for v in given if v is not None), None)
        if value is None and len(samples):
            mean = samples.mean()
            value = float(mean if figure == "mean" else np.percentile(samples, int(figure[1:])))
        figures[f"{figure}_s"] = value
    return ServedTime(name=name, **figures) if set(figures.values()) != {None} else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) and number >= 0 else None
