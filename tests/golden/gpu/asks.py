"""What the golden files of GPUs hold: which experiments. Needs no JAX."""

import json
from pathlib import Path
from typing import Any

from meshscope.api.options import request_of
from meshscope.api.request import ExperimentRequest
from meshscope.plans.experiment import Experiment

GPU_DIR = Path(__file__).parent
_STORED: dict[str, dict[str, Any]] = json.loads((GPU_DIR / "asks.json").read_text())
ASKS = {name: _STORED["usual"] | asked for name, asked in _STORED["asks"].items()}
# One GPU: no collectives. `output` is such that the cache is a multiple of 64 positions.
ONE = {name: _STORED["usual"] | asked for name, asked in _STORED["one"].items()}


def asked(name: str) -> Experiment:
    """The experiment of a golden file."""
    return request_of(ExperimentRequest, (ASKS | ONE)[name]).experiment()
