"""Prepares a worker process for the model code of SGLang-JAX, before that is imported."""

from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.stubs import install_stubs

# Imported by SGLang-JAX and not installed with it; none is used in a lowered program.
MISSING = (
    "transformers",
    "huggingface_hub",
    "safetensors",
    "modelscope",
    "tokenizers",
    "torch",
    "fastapi",
    "starlette",
    "uvicorn",
    "zmq",
    "orjson",
    "psutil",
    "pydantic",
    "requests",
    "tqdm",
    "jinja2",
    "llguidance",
    "pybase64",
    "pathwaysutils",
    "prometheus_client",
    "aiohttp",
    "yaml",
    "PIL",
    "partial_json_parser",
    "openai",
    "tiktoken",
    "pandas",
    "httpx",
    "uvloop",
    "setproctitle",
    "msgpack",
)


def prepare_sglang_jax(experiment: Experiment) -> None:
    """Makes the engine's imports work."""
    del experiment
    install_stubs(MISSING)
