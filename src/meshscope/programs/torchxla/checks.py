"""What the torch_xla front end can trace; plain Python, so that `predict` refuses what `compile` does."""

from meshscope.errors import PlanError
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Partitioner
from meshscope.programs.torchxla.configs import hugging_face_config
from meshscope.programs.torchxla.layouts import kv_heads


def check_traceable(experiment: Experiment) -> None:
    """SpecError or PlanError for parts of the model and plans that this front end has no program for."""
    hugging_face_config(experiment.model)
    _check_heads(experiment)
    _check_attention(experiment)


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


def _check_attention(experiment: Experiment) -> None:
    """PlanError for attention that has no program with pp or cp here, or none with --partitioner auto."""
    model, plan = experiment.model, experiment.plan
    if model.has_linear_attention:
        kind, scatters = "linear", False
    elif model.attention.mechanism is Mechanism.COMPRESSED:
        kind, scatters = "compressed", True
    elif model.attention.chosen_positions is not None:
        kind, scatters = "indexed", True
    else:
        return
    if axes := [axis for axis in ("pp", "cp") if getattr(plan, axis) > 1]:
        raise PlanError(
            f"plan '{plan}': {model.name} has {kind} attention, for which --frontend torchxla has no program with "
            f"{' or '.join(axes)}. Use --frontend jax, or a plan without pp and cp."
        )
    if scatters and experiment.program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"--partitioner auto: --frontend torchxla replaces the attention of {model.name}, whose indexer "
            "scatters positions one by one. Use --partitioner manual, or --frontend jax."
        )
