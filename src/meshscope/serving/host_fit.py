"""Time of the host in a step, fitted to the median ITL of a `vllm bench serve` result."""

from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from meshscope.errors import ParseError
from meshscope.files import read_json
from meshscope.serving.apart import EnginePool
from meshscope.serving.load import Load
from meshscope.serving.results import percentiles
from meshscope.serving.simulation import served_alone

TOLERANCE = 0.005  # of the measured ITL

_KEYS = (
    "completed", "total_input_tokens", "total_output_tokens", "request_rate", "median_itl_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What a benchmark sent, on average, and the median time between two tokens that it measured."""

    n_requests: int
    prompt: int
    output: int
    rate_per_s: float | None  # None: all at once
    burstiness: float
    max_concurrency: int | None
    itl_s: float

    def load(self) -> Load:
        """Requests of mean lengths with gaps of the benchmark's distribution."""
        n, shape = self.n_requests, self.burstiness
        gaps_s = np.zeros(n)
        if self.rate_per_s is not None:
            rng = np.random.default_rng(0)
            gaps_s = rng.gamma(shape, 1 / (shape * self.rate_per_s), n)
        return Load(
            arrival_s=np.cumsum(gaps_s),
            n_prompt=np.full(n, self.prompt),
            n_output=np.full(n, self.output),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """Seconds of the host in a step, with the median ITL measured and without any host time."""

    host_s: float
    measured_itl_s: float
    device_itl_s: float

    @property
    def is_host_bound(self) -> bool:
        """Whether the host takes more of a step than the device."""
        return self.host_s > self.device_itl_s


def read_bench(path: Path) -> BenchResult:
    """The result that `vllm bench serve --save-result` wrote; ParseError for anything else."""
    try:
        document = read_json(path)
    except OSError as error:
        raise ParseError(f"cannot read '{path}': {error.strerror}. Give a result.") from error
    except ValueError as error:
        raise ParseError(f"{path}: not JSON ({error}). Give one result.") from error
    try:
        return _bench(document)
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        missing = [key for key in _KEYS if not isinstance(document, dict) or key not in document]
        reason = (
            f"it has no {', '.join(missing)}" if missing else f"{type(error).__name__}: {error}"
        )
        raise ParseError(
            f"{path}: no result of 'vllm bench serve --save-result': {reason}. "
            f"It needs {', '.join(_KEYS[:-1])} and {_KEYS[-1]}."
        ) from error


def _bench(document: Any) -> BenchResult:
    n = int(document["completed"])
    rate, concurrency = document["request_rate"], document.get("max_concurrency")
    bench = BenchResult(
        n_requests=n,
        prompt=round(document["total_input_tokens"] / n),
        output=round(document["total_output_tokens"] / n),
        rate_per_s=None if rate in {"inf", float("inf")} else float(rate),
        burstiness=float(document.get("burstiness") or 1.0),
        max_concurrency=None if concurrency is None else int(concurrency),
        itl_s=float(document["median_itl_ms"]) / 1e3,
    )
    sizes = (n, bench.prompt, bench.output - 1, bench.rate_per_s or 1.0, bench.burstiness)
    if min(*sizes, bench.itl_s, bench.max_concurrency or 1) <= 0 or not isfinite(bench.itl_s):
        raise ValueError("a figure is not positive, or requests have one output token")
    return bench


def fitted_host(bench: BenchResult, pool: EnginePool) -> HostFit:
    """The host time at which the simulated median ITL is the measured one; 0 if it is longer anyway."""
    load, most = bench.load().every(pool.n_engines), bench.max_concurrency
    of_engine = None if most is None else max(1, most // pool.n_engines)

    def itl_s(host_s: float) -> float:
        limits = replace(pool.policy, host_s=host_s)
        requests, _ = served_alone(load, replace(pool, policy=limits), max_concurrency=of_engine)
        gaps = percentiles(requests.gaps_s, requests.n_gaps)
        assert gaps is not None  # requests have at least two output tokens
        return gaps.p50_s

    device_s = itl_s(0.0)
    low_s, high_s = 0.0, bench.itl_s if device_s < bench.itl_s else 0.0
    while high_s - low_s > TOLERANCE * bench.itl_s:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if itl_s(middle_s) < bench.itl_s else (low_s, middle_s)
    return HostFit(host_s=(low_s + high_s) / 2, measured_itl_s=bench.itl_s, device_itl_s=device_s)
