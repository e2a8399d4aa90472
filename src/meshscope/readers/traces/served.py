"""Reads what `vllm bench serve` and SGLang's `bench_serving` save: TTFT, TPOT, ITL and E2E latency.

These are times of the client, queueing and network included. With `--save-detailed` the file has
every request, from which missing percentiles follow; without it, a percentile that the file lacks
is unknown.
"""

import math
from collections.abc import Iterable, Mapping
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
# Names of the latencies in the keys of a file, by vLLM and SGLang.
_KEYS = {
    "ttft": ("ttft",),
    "tpot": ("tpot",),
    "itl": ("itl",),
    "e2e": ("e2el", "e2e_latency"),
}
_QUANTILES = {"p50": ("median", "p50"), "p90": ("p90",), "p99": ("p99",)}


def read_served(path: Path) -> ServedBenchmark:
    """The benchmark in the file, the last one of several lines; TraceError if it is none."""
    try:
        data = read_file(path, MAX_BYTES)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}.") from error
    document = _document(data)
    times = tuple(_times(document)) if document else ()
    if document is None or not times:
        raise TraceError(
            f"{path}: has no latencies such as 'mean_ttft_ms'. Give the JSON of `vllm bench serve "
            "--save-result` or of `sglang.bench_serving`."
        )
    return ServedBenchmark(
        path=str(path),
        n_requests=_whole(document.get("completed")),
        times=times,
        requests_per_s=_number(document.get("request_throughput")),
        output_tokens_per_s=_number(document.get("output_throughput")),
    )


def _document(data: bytes) -> Mapping[str, Any] | None:
    for text in (data, *reversed(data.strip().splitlines()[-1:])):
        try:
            document = msgspec.json.decode(text)
        except FAULTS:
            continue
        if isinstance(document, dict):
            return document
    return None


def _times(document: Mapping[str, Any]) -> Iterable[ServedTime]:
    for name, keys in _KEYS.items():
        samples = _samples(document, name)
        figures = {
            field: _figure(document, keys, words)
            for field, words in (("mean", ("mean",)), *_QUANTILES.items())
        }
        if len(samples):
            figures = {
                f: v
                if v is not None
                else float(samples.mean() if f == "mean" else np.percentile(samples, int(f[1:])))
                for f, v in figures.items()
            }
        if any(value is not None for value in figures.values()):
            yield ServedTime(name=name, **{f"{field}_s": v for field, v in figures.items()})


def _figure(document: Mapping[str, Any], keys: Iterable[str], words: Iterable[str]) -> float | None:
    """The value of `median_ttft_ms` in seconds; None if the file has none of the names."""
    names = (f"{word}_{key}_ms" for key in keys for word in words)
    values = (_number(document.get(name)) for name in names)
    value = next((v for v in values if v is not None), None)
    return None if value is None else value * MS


def _samples(document: Mapping[str, Any], name: str) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """TTFT of each request, or ITL of each token, in seconds; empty without details."""
    listed = document.get({"ttft": "ttfts", "itl": "itls"}.get(name, ""))
    if not isinstance(listed, list):
        return np.empty(0)
    flat = [x for item in listed for x in (item if isinstance(item, list) else [item])]
    numbers = (number for x in flat if (number := _number(x)) is not None)
    return np.fromiter(numbers, np.float64)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
