"""Prepares a worker process for the model code of tpu-inference, before that is imported."""

import os

from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.engine_config import engine_variables_of
from meshscope.programs.engines.stubs import install_stubs

# Imported by tpu-inference 0.12 to 0.32 and not installed with it; none is used in a lowered program.
MISSING = (
    "vllm",
    "torch",
    "torchax",
    "torchvision",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "runai_model_streamer",
    "pathwaysutils",
    "tpu_info",
    "numba",
    "jaxtyping",
    "einops",
    "filelock",
    "regex",
    "tqdm",
    "requests",
)
# Its front end for vllm's own torch models, which derives classes from those of torch and vllm.
TORCH_FRONTEND = ("tpu_inference.models.vllm", "tpu_inference.layers.vllm.quantization")

ENVIRONMENT = {
    "TPU_WORKER_ID": "0",  # this and the next keep tpu-inference from asking Google's metadata server
    "TPU_NAME": "none",
    "VLLM_TARGET_DEVICE": "tpu",
}


def prepare_tpu_inference(experiment: Experiment) -> None:
    """Sets the engine's environment variables and makes its imports work."""
    os.environ.update(ENVIRONMENT | engine_variables_of(experiment))
    install_stubs(MISSING, replaced=TORCH_FRONTEND)
