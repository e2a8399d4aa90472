"""Fits what the kernels of experts of servers take on tpu7x to half of the published layers.

    python tools/fit_experts.py

The fitted half is marked in `tools/published_parts.csv`. Each constant is pulled to its prior. Writes the values of
`grouped_experts` and `fused_experts` in `src/meshscope/hardware/operation_rates.json`; their sources are written there.
"""

import json
import sys
from dataclasses import astuple
from math import log
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from meshscope.hardware import compiler_facts
from meshscope.hardware.compiler_facts import OPERATIONS, ServedExperts

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from accuracy_parts import layer_s, published_parts

CHIP = "tpu7x"
ERROR, PRIOR_ERROR = 0.08, 0.4  # of a layer and of a prior, as natural logarithms
PRIORS = {
    # The latency of a copy of 4 MiB beyond its bytes; 60 % of the bf16 peak; gathers of a published SparseCore kernel.
    "layer": (10e-6, 1.1e-6, 7e14, 5.6e11),
    # A barrier and a gather; as above; 60 % of the bf16 peak; the links of a chip in both directions.
    "fused layer": (20e-6, 1.1e-6, 7e14, 2e11),
}
NAMES = {"layer": "grouped_experts", "fused layer": "fused_experts"}


def fitted(kind: str) -> ServedExperts:
    """The constants of one kind of layer."""
    rows = [r for r in published_parts() if r["kind"] == kind and r["half"] == "fitted"]
    prior, by_chip = np.log(PRIORS[kind]), getattr(OPERATIONS, NAMES[kind])

    def errors(point: np.ndarray) -> np.ndarray:
        by_chip[CHIP] = ServedExperts(**dict(zip(FIELDS, np.exp(point).tolist(), strict=True)))
        of_rows = [log(layer_s(row) / (float(row["published_us"]) / 1e6)) / ERROR for row in rows]
        return np.array([*of_rows, *((point - prior) / PRIOR_ERROR)])

    errors(least_squares(errors, prior, loss="soft_l1", diff_step=1e-3).x)
    return by_chip[CHIP]


FIELDS = tuple(ServedExperts.__dataclass_fields__)


def main() -> None:
    """Fits both kinds and writes them."""
    path = Path(compiler_facts.__file__).with_name(compiler_facts.OPERATION_FACTS)
    text = path.read_text("utf-8")
    for kind, name in NAMES.items():
        old = json.loads(text)[name]["value"][CHIP]
        new = dict(zip(FIELDS, (float(f"{x:.3g}") for x in astuple(fitted(kind))), strict=True))
        assert text.count(json.dumps(old)) == 1, name
        text = text.replace(json.dumps(old), json.dumps(new))
        print(name, new)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
