"""Fits the host's time of each serving engine to the fitted half of published runs, and writes engines.toml.

The residual of the median time between tokens over the simulated device's is host_layer_s l + host_sequence_s n for
l layers and n running sequences; both are at least 0, and the sum of relative errors is least, so that a model whose
device time is far off counts as one run. What is then left of the median TTFT is host_request_s, in the same way. A
row with `cache_reads` has the one of CACHE_READS that leaves the least errors. A version has a term for every
RUNS_PER_TERM runs, so with few runs none per sequence.
"""

import re
import tomllib
from collections import Counter, defaultdict
from dataclasses import fields, replace
from itertools import product
from math import ceil, exp, log, sqrt
from pathlib import Path

import numpy as np
from published_serving import (
    PublishedServing,
    ServingMedians,
    published_serving,
    simulated_serving,
)
from scipy.optimize import linprog

from meshscope.serving.servers import ENGINES, ServingEngine

RUNS_PER_TERM = 2
MANY_RUNS = 20  # with fewer, a version has the interval of all that have few
WITHIN = 0.9  # of the figures are inside the interval
TERMS = ("host_layer_s", "host_sequence_s", "host_request_s")
CACHE_READS = np.arange(1, 6.1, 0.5).tolist()
FILE = Path(__file__).parents[1] / "src/meshscope/serving/engines.toml"


def fitted_terms(
    runs: list[PublishedServing], alone: ServingEngine, *, n_terms: int
) -> tuple[float, float, float]:
    """The sum of relative errors, and seconds of the host for a layer and, with two terms, for each running sequence.

    `alone` is the engine without a host.
    """
    weights: list[tuple[float, float]] = []
    residuals: list[float] = []
    for run in runs:
        device, published = simulated_serving(run, alone), run.medians
        name = "itl_s" if published.itl_s is not None else "tpot_s"
        published_s, device_s = getattr(published, name), getattr(device, name)
        if published_s is None or device_s is None or device.output_tokens_per_s is None:
            continue
        n_running = device.output_tokens_per_s * (device.tpot_s or device_s)
        n_layers = len(run.experiment.model.layers)
        weights.append((n_layers / published_s, (n_terms > 1) * n_running / published_s))
        residuals.append((published_s - device_s) / published_s)
    of_terms, at, each = np.array(weights), np.array(residuals), np.eye(len(weights))
    fit = linprog(
        np.append(np.zeros(2), np.ones(len(at))),
        A_ub=np.block([[of_terms, -each], [-of_terms, -each]]),
        b_ub=np.append(at, -at),
    )
    return float(fit.fun), float(fit.x[0]), float(fit.x[1])


def fitted_request(runs: list[PublishedServing], engine: ServingEngine) -> float:
    """Seconds before a request reaches the scheduler: the median of what TTFT lacks, weighted by 1 / TTFT."""
    pairs = [
        (ttft_s - simulated, ttft_s)
        for run in runs
        if (ttft_s := run.medians.ttft_s) is not None
        if (simulated := simulated_serving(run, engine).ttft_s) is not None
    ]
    if not pairs:
        return 0.0
    lacking, ttft_s = np.array(sorted(pairs)).T
    weights = np.cumsum(1 / ttft_s)
    return max(0.0, float(lacking[np.searchsorted(weights, weights[-1] / 2)]))


def interval_factors(fitted: list[tuple[ServingEngine, list[PublishedServing]]]) -> list[float]:
    """The factor within which 90 % of the figures of each version's runs are; versions with few runs share one."""
    errors: dict[str, list[float]] = defaultdict(list)
    n_runs, n_terms = Counter[str](), Counter[str]()
    for engine, runs in fitted:
        shared = _shared(engine, runs)
        n_runs[shared] += len(runs)
        n_terms[shared] += sum(getattr(engine, name) > 0 for name in TERMS) + (
            engine.cache_reads > 1
        )
        for run, name in product(runs, [field.name for field in fields(ServingMedians)]):
            published, simulated = (
                getattr(one, name) for one in (run.medians, simulated_serving(run, engine))
            )
            if published is not None and simulated is not None:
                errors[shared].append(abs(log(simulated / published)))
    factors: list[float] = []
    for one in fitted:
        shared = _shared(*one)
        # The rank at which as many new figures would be inside, with the degrees of freedom that the terms leave.
        rank = min(1.0, WITHIN * (len(errors[shared]) + 1) / len(errors[shared]))
        spread = sqrt(n_runs[shared] / (n_runs[shared] - n_terms[shared]))
        factor = exp(spread * np.quantile(errors[shared], rank, method="higher"))
        factors.append(ceil(100 * factor) / 100)
    return factors


def _shared(engine: ServingEngine, runs: list[PublishedServing]) -> str:
    return "" if len(runs) < MANY_RUNS else str(engine)


def main() -> None:
    """Replaces the terms of every engine."""
    text = FILE.read_text(encoding="utf-8")
    given = tomllib.loads(text)["engines"]
    fitted: list[tuple[ServingEngine, list[PublishedServing]]] = []
    for engine, row in zip(ENGINES, given, strict=True):
        runs = [run for run in published_serving() if run.server == str(engine) and run.is_fitted]
        alone = replace(engine, host_layer_s=0.0, host_sequence_s=0.0, host_request_s=0.0)
        n_terms = len(runs) // RUNS_PER_TERM - ("cache_reads" in row)
        (_, layer_s, sequence_s), alone = min(
            (
                (fitted_terms(runs, one, n_terms=n_terms), one)
                for one in _with_cache_reads(alone, row)
            ),
            key=lambda fit: fit[0][0],
        )
        stepped = replace(alone, host_layer_s=layer_s, host_sequence_s=sequence_s)
        fitted.append((replace(stepped, host_request_s=fitted_request(runs, stepped)), runs))
    for (engine, runs), factor in zip(fitted, interval_factors(fitted), strict=True):
        terms = {
            "host_layer_s": f"{engine.host_layer_s:.3e}",
            "host_sequence_s": f"{engine.host_sequence_s:.3e}",
            "host_request_s": f"{engine.host_request_s:.3e}",
            "cache_reads": f"{engine.cache_reads:.1f}",
            "n_runs": str(len(runs)),
            "interval_factor": f"{factor:.2f}",
        }
        head = re.escape(f'name = "{engine.name}"\nversion = "{engine.version}"')
        of_engine = re.search(rf"{head}.*?(?=\n\n|\Z)", text, re.DOTALL)
        assert of_engine is not None
        block = of_engine[0]
        for name, value in terms.items():
            block = re.sub(rf"(\n{name} = )[^\n]+", rf"\g<1>{value}", block)
        text = text.replace(of_engine[0], block)
    FILE.write_text(text, encoding="utf-8")


def _with_cache_reads(alone: ServingEngine, row: dict[str, object]) -> list[ServingEngine]:
    """The engines to choose from: one for each of CACHE_READS if the row has such a term."""
    factors = CACHE_READS if "cache_reads" in row else [alone.cache_reads]
    return [replace(alone, cache_reads=factor) for factor in factors]


if __name__ == "__main__":
    main()
