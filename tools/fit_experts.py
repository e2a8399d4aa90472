"""Fits what the kernels of experts of servers take on tpu7x to half of the published layers.

    python tools/fit_experts.py

The fitted half is marked in `tools/published_parts.csv`. Each constant is pulled to its prior. Writes the values of
`grouped_experts` and `fused_experts` in `src/meshscope/hardware/operation_rates.json`; their sources are written there.
"""

import json
import sys
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from meshscope.cost.features import VLLM_EXPERTS
from meshscope.hardware import compiler_facts
from meshscope.hardware.compiler_facts import OPERATIONS, ServedExperts

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from accuracy_parts import layer_s, published_parts

CHIP = "tpu7x"
ERROR, PRIOR_ERROR = 0.08, 0.4  # of a layer and of a prior, as natural logarithms
PRIORS = {
    # The latency of a copy of 4 MiB beyond its bytes; 60 % of the bf16 peak; gathers of a published SparseCore kernel.
    # Then both products with one-hot masks by the cycles of libtpu 0.0.42.1 (1.46 million for 2,048 tokens).
    "layer": (10e-6, 1.1e-6, 7e14, 5.6e11, 1.03e15),
    # A barrier and a gather; as above; 60 % of the bf16 peak; the links of a chip in both directions.
    "fused layer": (20e-6, 1.1e-6, 7e14, 2e11),
}
NAMES = {"layer": "grouped_experts", "fused layer": "fused_experts"}


def fitted(kind: str) -> ServedExperts:
    """The constants of one kind of layer."""
    rows = [r for r in published_parts() if r["kind"] == kind and r["half"] == "fitted"]
    prior = np.log(PRIORS[kind])
    is_fused = kind == "fused layer"
    by_chip = OPERATIONS.fused_experts if is_fused else OPERATIONS.grouped_experts[VLLM_EXPERTS]
    assert isinstance(by_chip, dict)

    def errors(point: np.ndarray) -> np.ndarray:
        rates = dict(zip(FIELDS, np.exp(point).tolist(), strict=False))
        by_chip[CHIP] = replace(by_chip[CHIP], **rates)
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
        stored, taken = json.loads(text)[name]["value"], fitted(kind)
        versions = [stored] if kind == "fused layer" else list(stored.values())
        first = stored if kind == "fused layer" else stored[VLLM_EXPERTS]
        new = {one: float(f"{getattr(taken, one):.3g}") for one in FIELDS[: len(PRIORS[kind])]}
        for version in versions:  # others keep what they have of their own
            old = version[CHIP]
            shared = {one: new[one] for one in new if old[one] == first[CHIP][one]}
            text = text.replace(json.dumps(old), json.dumps(old | shared))
        print(name, new)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
