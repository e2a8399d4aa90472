"""MaxText's configuration of an experiment, from its own files."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import maxtext
from maxtext.configs import pyconfig

from meshscope.errors import SpecError
from meshscope.model.model import LatentAttention
from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.maxtext_models import AXES, maxtext_model, sizes_of

CONFIGS = Path(*maxtext.__path__) / "configs"
DTYPES = {"bf16": "bfloat16", "f32": "float32"}


def configuration(
    experiment: Experiment,
    devices: list[Any],
    *,
    base: str = "inference/inference.yml",
    **options: Any,
) -> Any:
    """MaxText's configuration of an experiment; SpecError if its model has other sizes.

    `base` is the file of `maxtext/configs`, and `options` are more of MaxText's settings.
    """
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as MaxText's scripts set it
    jax.devices = lambda *_, **__: devices  # MaxText counts them for the batch and the mesh
    jax.device_count = lambda *_, **__: len(devices)
    plan, workload = experiment.plan, experiment.workload
    axes = {f"ici_{name}_parallelism": getattr(plan, axis) for axis, name in AXES.items()}
    settings = {
        "model_name": maxtext_model(experiment.model),
        "override_model_config": True,  # the number of layers
        "base_num_decoder_layers": experiment.model.n_layers,
        "scan_layers": False,
        "dtype": DTYPES[workload.activation_dtype],
        "weight_dtype": DTYPES[workload.weight_dtype],
        **axes,
        "dcn_data_parallelism": 1,
        "num_slices": 1,
        "per_device_batch_size": workload.batch / len(devices),
        "max_prefill_predict_length": workload.prompt,
        "max_target_length": workload.context,
        "hardware": "tpu",
        "run_name": "meshscope",
        "base_output_directory": "unused",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "log_config": False,
        **options,
    }
    texts = [f"{name}={value}" for name, value in settings.items()]
    with _own_flags():
        config = pyconfig.initialize(["meshscope", str(CONFIGS / base), *texts])
    jax.config.update("jax_use_shardy_partitioner", config.shardy)
    _check_sizes(experiment, config)
    return config


def inference_settings(experiment: Experiment) -> dict[str, Any]:
    """The model's settings without which a decode step does not lower under `tensor`, in release 0.2.5.

    Megablox leaves the sum of the experts split over `tensor`; MaxText's inference settings of Llama 4 and
    Mixtral turn it off, too. The cache of whole keys takes those of 192 for values of 128.
    """
    settings: dict[str, Any] = {}
    if experiment.model.moe is not None:
        settings |= {"sparse_matmul": False, "megablox": False}
    if isinstance(experiment.model.attention, LatentAttention):
        settings["mla_naive_kvcache"] = False
    return settings


@contextmanager
def _own_flags() -> Generator[None]:
    """Keeps XLA_FLAGS, to which MaxText adds a folder for dumps."""
    flags = os.environ.get("XLA_FLAGS")
    yield
    os.environ.pop("XLA_FLAGS", None)
    if flags is not None:
        os.environ["XLA_FLAGS"] = flags


def _check_sizes(experiment: Experiment, config: Any) -> None:
    model = experiment.model
    for name, size in sizes_of(model).items():
        if (configured := getattr(config, name)) != size:
            raise SpecError(
                f"{model.name}: MaxText's {config.model_name} has {name}={configured} instead of {size}. Use "
                "--frontend jax, or a model of MaxText's sizes."
            )
