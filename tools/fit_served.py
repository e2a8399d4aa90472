"""Fits the host's time of each serving engine to the fitted half of published runs, and writes engines.toml.

The residual of the median time between tokens over the simulated device's is host_s + host_sequence_s n for n
running sequences; both are at least 0, and the sum of relative errors is least, so that a model whose device time
is far off counts as one run.
"""

import re
from pathlib import Path

import numpy as np
from published_serving import PublishedServing, published_serving, simulated_serving
from scipy.optimize import linprog

from meshscope.serving.servers import ENGINES

FILE = Path(__file__).parents[1] / "src/meshscope/serving/engines.toml"


def fitted_terms(runs: list[PublishedServing]) -> tuple[float, float]:
    """Seconds of the host for a step, and for each running sequence."""
    weights: list[tuple[float, float]] = []
    residuals: list[float] = []
    for run in runs:
        device, published = simulated_serving(run, has_host=False), run.medians
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
    return float(fit.x[0]), float(fit.x[1])


def main() -> None:
    """Replaces the terms of every engine."""
    text = FILE.read_text(encoding="utf-8")
    for engine in ENGINES:
        runs = [run for run in published_serving() if run.server == str(engine) and run.is_fitted]
        step_s, sequence_s = fitted_terms(runs)
        head = re.escape(f'name = "{engine.name}"\nversion = "{engine.version}"')
        row = re.compile(rf"({head}.*?host_s = )[^\n]+(\nhost_sequence_s = )[^\n]+", re.DOTALL)
        text = row.sub(rf"\g<1>{step_s:.4e}\g<2>{sequence_s:.3e}", text)
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
