"""Published runs of a server on real TPUs, and the same runs simulated.

The nightly benchmark of sglang-jax of 2026-01-13, Qwen3-8B in bf16 on one v6e and on v6e-4: a client keeps N
requests in flight and sends 3 N, each with the same prompt and output. Chunks of 2,048 tokens, steps that prefill
or decode, 0.8 of the memory for weights and cache, no prefix cache. Source of the figures:
pathfinder-pf/sglang-jax-ci-data@444cfdd and @f258261, perf/2026-01-13, medians; of the conditions:
sgl-project/sglang-jax, test/srt/nightly-test/test_perf.py.

Every second run of a slice is for the fit of the host's time, the others are the holdout.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import meshscope

CSV = Path(__file__).with_suffix(".csv")
MODEL = "Qwen/Qwen3-8B"
ROUNDS = 3  # requests over those in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedServing:
    """A published run: what was asked, and its medians. `itl_s` is None for one output token."""

    topology: str
    plan: str
    is_fitted: bool
    concurrency: int
    prompt: int
    output: int
    ttft_s: float
    itl_s: float | None
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedServing:
    """The medians and the rate of the simulated run."""

    ttft_s: float
    itl_s: float | None
    output_tokens_per_s: float


@cache
def published_serving() -> tuple[PublishedServing, ...]:
    """The rows of the CSV file, in order."""
    with CSV.open(encoding="utf-8") as file:
        return tuple(_published(row) for row in csv.DictReader(file))


def _published(row: Mapping[str, str]) -> PublishedServing:
    return PublishedServing(
        topology=row["topology"],
        plan=row["plan"],
        is_fitted=row["half"] == "fitted",
        concurrency=int(row["concurrency"]),
        prompt=int(row["prompt"]),
        output=int(row["output"]),
        ttft_s=float(row["ttft_ms"]) / 1e3,
        itl_s=float(row["itl_ms"]) / 1e3 if row["itl_ms"] else None,
        output_tokens_per_s=float(row["output_tokens_per_s"]),
    )


@cache
def simulated_serving(run: PublishedServing, host_s: float) -> SimulatedServing:
    """The run with this time of the host in every step."""
    served = meshscope.serve_sim(
        MODEL,
        topology=run.topology,
        plan=run.plan,
        max_concurrency=run.concurrency,
        requests=ROUNDS * run.concurrency,
        prompt=run.prompt,
        output=run.output,
        memory_frac=0.8,
        reserve_output=1.0,
        separate_steps=True,
        host_overhead=host_s,
    )
    figures = served.outcome.result.figures
    assert figures.ttft is not None
    return SimulatedServing(
        ttft_s=figures.ttft.p50_s,
        itl_s=None if figures.itl is None else figures.itl.p50_s,
        output_tokens_per_s=figures.output_tokens_per_s,
    )


def fitted_host_s() -> float:
    """Seconds of the host in a step: the median of what the fitted runs take beyond the device."""
    return round(median(_beyond_device_s()), 5)


def _beyond_device_s() -> Iterator[float]:
    for run in published_serving():
        if run.is_fitted and run.itl_s is not None:
            device_s = simulated_serving(run, 0.0).itl_s
            assert device_s is not None
            yield run.itl_s - device_s
