"""What the golden files of GPUs hold: which experiments. Needs no JAX."""

from pathlib import Path
from typing import Any

from meshscope.api.options import request_of
from meshscope.api.request import ExperimentRequest
from meshscope.plans.experiment import Experiment

GPU_DIR = Path(__file__).parent
DENSE: dict[str, Any] = {
    "model": "Qwen/Qwen3-8B",
    "layers": 2,
    "batch": 4,
    "prompt": 256,
    "output": 4,
    "kernels": "off",
}
KERNELS = DENSE | {"kernels": "auto"}
EXPERTS: dict[str, Any] = DENSE | {"model": "deepseek-ai/DeepSeek-V2-Lite"}

ASKS: dict[str, dict[str, Any]] = {
    "h100_tp8": DENSE | {"topology": "h100:8", "plan": "tp=8"},
    "h100_tp8_scan": DENSE | {"topology": "h100:8", "plan": "tp=8", "layers": 4, "loop": "scan"},
    "a100_tp4sp": DENSE | {"topology": "a100:4", "plan": "tp=4,sp"},
    "h200_fsdp4_tp2": DENSE | {"topology": "h200:8", "plan": "fsdp=4,tp=2"},
    "h200_pp2": DENSE | {"topology": "h200:8", "plan": "pp=2,dp=2,tp=2"},
    "h200_cp2": DENSE | {"topology": "h200:8", "plan": "cp=2,tp=4"},
    "h100_two_hosts": DENSE | {"topology": "h100:16", "plan": "dp=2,tp=8"},
    "h100_ep8": EXPERTS | {"topology": "h100:8", "plan": "dp=2,tp=4,ep=8"},
    "h200_tp4": KERNELS | {"topology": "h200:4", "plan": "tp=4"},
}

# One GPU: no collectives. `output` is such that the cache is a multiple of 64 positions.
ONE: dict[str, dict[str, Any]] = {
    "h200_one": KERNELS | {"topology": "h200:1", "plan": "tp=1", "batch": 1, "output": 128},
}


def asked(name: str) -> Experiment:
    """The experiment of a golden file."""
    return request_of(ExperimentRequest, (ASKS | ONE)[name]).experiment()
