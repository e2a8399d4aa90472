"""What the torch_xla front end can trace; plain Python, so that `predict` refuses what `compile` does."""

from meshscope.errors import PlanError
from meshscope.programs.torchxla.configs import hugging_face_config
from meshscope.programs.torchxla.layouts import kv_heads
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import (
    CompressedAttention,
    LatentAttention,
    Model,
)
from meshscope.spec.program import Partitioner


def check_traceable(experiment: Experiment) -> None:
    """SpecError or PlanError for parts of the model and plans that this front end has no program for."""
    hugging_face_config(experiment.model)
    _check_heads(experiment)
    _check_indexer(experiment)


def _check_heads(experiment: Experiment) -> None:
    """PlanError if two kinds of layers have fewer KV heads than tp has devices."""
    plan = experiment.plan
    fewer = sorted(n for n in kv_heads(experiment.model) if n < plan.tp)
    if len(fewer) > 1:
        raise PlanError(
            f"plan '{plan}': layers of {experiment.model.name} have {' or '.join(map(str, fewer))} KV heads, fewer "
            f"than tp={plan.tp}, and --frontend torchxla replicates one number of KV heads only. Use "
            f"tp={fewer[-1]} or less, or --frontend jax."
        )


def has_sparse_latents(model: Model) -> bool:
    """Whether an indexer chooses the latents that queries attend to."""
    return isinstance(model.attention, LatentAttention) and model.attention.indexer is not None


def _check_indexer(experiment: Experiment) -> None:
    """PlanError for --partitioner auto with an indexer."""
    model = experiment.model
    if not (has_sparse_latents(model) or isinstance(model.attention, CompressedAttention)):
        return
    if experiment.program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"--partitioner auto: --frontend torchxla replaces the attention of {model.name}, whose indexer "
            "scatters positions one by one. Use --partitioner manual, or --frontend jax."
        )
