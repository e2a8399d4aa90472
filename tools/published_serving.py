"""Published runs of servers on real TPUs, and the same runs simulated with `--server`.

A client keeps `concurrency` requests in flight, each with the same prompt and output, or uniform around them or
between two lengths (`lengths`; `bench_serving` draws from 1 on unless it is given a range ratio). `step_tokens` and `max_sequences`, where it is known, are limits of each data-parallel rank. A row has the medians that were published; a peak of output tokens per second is given as time between
tokens. Left out of the 103 published figures: models outside the catalog, slices that are not stated, saturated
request rates of two servers before the versions here, and p99 figures.

Every second run of a server and chip is for the fit of the host's time, the others are the holdout.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from meshscope.api.request import ExperimentRequest
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import parse_plan
from meshscope.serving.load import Lengths, random_load
from meshscope.serving.objective import Objective
from meshscope.serving.placed import place_of
from meshscope.serving.servers import ServingEngine, serving_engine
from meshscope.serving.simulation import load_figures

CSV = Path(__file__).with_suffix(".csv")
INFERENCE_X = "InferenceX"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMedians:
    """The medians of a run, and its rate; None for a figure that was not published."""

    ttft_s: float | None
    itl_s: float | None
    tpot_s: float | None
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedServing:
    """A published run: what was asked, and its medians."""

    server: str
    model: str
    topology: str
    plan: str
    weight_dtype: str
    cache_dtype: str
    is_fitted: bool
    step_tokens: int
    max_sequences: int | None
    concurrency: int
    requests: int
    prompt: int
    output: int
    lengths: str
    medians: ServingMedians
    source: str

    @property
    def chip(self) -> str:
        """The name of its chip."""
        return self.topology.split("-", maxsplit=1)[0]

    @property
    def experiment(self) -> Experiment:
        """The model on its slice, with a sequence for each rank."""
        config = CSV.parent / "published_configs" / self.model
        return ExperimentRequest(
            model=str(config) if config.is_file() else self.model,
            topology=self.topology,
            plan=self.plan,
            batch=parse_plan(self.plan).data_size,
            prompt=self.prompt,
            output=self.output,
            weight_dtype=self.weight_dtype,
            cache_dtype=self.cache_dtype,
        ).experiment()

    @property
    def is_inference_x(self) -> bool:
        """Whether it is a point of InferenceX, which has a table of its own."""
        return INFERENCE_X in self.source


@cache
def published_serving() -> tuple[PublishedServing, ...]:
    """The rows of the CSV file, in order."""
    with CSV.open(encoding="utf-8") as file:
        return tuple(_published(row) for row in csv.DictReader(file))


def _published(row: Mapping[str, str]) -> PublishedServing:
    def figure(name: str, scale: float = 1e3) -> float | None:
        return float(row[name]) / scale if row[name] else None

    names = ("server", "model", "topology", "plan", "weight_dtype", "cache_dtype", "source")
    numbers = ("step_tokens", "concurrency", "requests", "prompt", "output")
    return PublishedServing(
        **{name: row[name] for name in names},
        **{name: int(row[name]) for name in numbers},
        is_fitted=row["half"] == "fitted",
        max_sequences=int(row["max_sequences"]) if row["max_sequences"] else None,
        lengths=row["lengths"],
        medians=ServingMedians(
            ttft_s=figure("ttft_ms"),
            itl_s=figure("itl_ms"),
            tpot_s=figure("tpot_ms"),
            output_tokens_per_s=figure("output_tokens_per_s", 1),
        ),
    )


@cache
def simulated_serving(run: PublishedServing, engine: ServingEngine | None = None) -> ServingMedians:
    """The run as its server would serve it, or an engine with other times of the host."""
    engine = engine or serving_engine(run.server)
    least, _, most = run.lengths.partition(":")
    between = np.array([[0, 1], *[[int(least), int(most)]] * 2]) if most else Lengths(least)
    load = random_load(
        1.0,
        rate_per_s=None,
        n_requests=run.requests,
        prompt=run.prompt,
        output=run.output,
        lengths=between,
    )
    limits = {"max_step_tokens": run.step_tokens}
    if run.max_sequences is not None:
        limits["max_sequences"] = run.max_sequences
    memory_frac = 0.8 if run.server == "sglang-jax@2026.01" else None
    place = place_of(run.experiment, engine, memory_frac=memory_frac, **limits)
    pool = place.pool(int((load.n_prompt + load.n_output).max())).pool
    figures = load_figures(load, pool, Objective(), max_concurrency=run.concurrency)
    assert figures.ttft is not None
    return ServingMedians(
        ttft_s=figures.ttft.p50_s,
        itl_s=None if figures.itl is None else figures.itl.p50_s,
        tpot_s=None if figures.tpot is None else figures.tpot.p50_s,
        output_tokens_per_s=figures.output_tokens_per_s,
    )


def error(run: PublishedServing, name: str) -> float | None:
    """Simulated over published, minus 1; None for a figure that was not published."""
    published, simulated = getattr(run.medians, name), getattr(simulated_serving(run), name)
    return None if published is None or simulated is None else simulated / published - 1
