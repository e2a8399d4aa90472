"""Fits the host's time of each serving engine to the fitted half of published runs, and writes engines.toml.

The residual of the median time between tokens over the simulated device's is host_s + host_sequence_s n for n
running sequences; both are at least 0, and the sum of relative errors is least, so that a model whose device time
is far off counts as one run. What is then left of the median TTFT is host_request_s, in the same way. A row with
`cache_reads` has the one of CACHE_READS that leaves the least errors.
"""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
from published_serving import PublishedServing, published_serving, simulated_serving
from scipy.optimize import linprog

from meshscope.serving.servers import ENGINES, ServingEngine

CACHE_READS = np.arange(1, 6.1, 0.5).tolist()
FILE = Path(__file__).parents[1] / "src/meshscope/serving/engines.toml"


def fitted_terms(runs: list[PublishedServing], alone: ServingEngine) -> tuple[float, float, float]:
    """The sum of relative errors, and seconds of the host for a step and for each running sequence.

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
        weights.append((1 / published_s, n_running / published_s))
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


def main() -> None:
    """Replaces the terms of every engine."""
    text = FILE.read_text(encoding="utf-8")
    given = tomllib.loads(text)["engines"]
    for engine, row in zip(ENGINES, given, strict=True):
        runs = [run for run in published_serving() if run.server == str(engine) and run.is_fitted]
        alone = replace(engine, host_s=0.0, host_sequence_s=0.0, host_request_s=0.0)
        (_, step_s, sequence_s), alone = min(
            ((fitted_terms(runs, one), one) for one in _with_cache_reads(alone, row)),
            key=lambda fit: fit[0][0],
        )
        stepped = replace(alone, host_s=step_s, host_sequence_s=sequence_s)
        terms = {
            "host_s": f"{step_s:.4e}",
            "host_sequence_s": f"{sequence_s:.3e}",
            "host_request_s": f"{fitted_request(runs, stepped):.3e}",
            "cache_reads": f"{alone.cache_reads:.1f}",
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
