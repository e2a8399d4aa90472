"""What the torch_xla front end can trace; plain Python, so that `predict` refuses what `compile` does."""

from collections.abc import Sequence
from dataclasses import replace

from meshscope.errors import PlanError
from meshscope.programs.torchxla.configs import hugging_face_config
from meshscope.programs.torchxla.layouts import kv_heads
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.flops import has_linear_attention
from meshscope.spec.model.model import (
    AttentionKind,
    CompressedAttention,
    Family,
    GroupedAttention,
    LatentAttention,
    Layer,
    MlpKind,
    Model,
)
from meshscope.spec.plan.stages import stage_layers
from meshscope.spec.program import Partitioner

# What distinguishes the layers of a family beside their windows.
DIFFERENCES = {
    Family.LLAMA4: "chunks",
    Family.GEMMA3: "rotary embeddings",
    Family.GEMMA4: "heads",
}


def check_traceable(experiment: Experiment) -> None:
    """SpecError or PlanError for parts of the model and plans that this front end has no program for."""
    hugging_face_config(experiment.model)
    _check_heads(experiment)
    _check_indexer(experiment)
    if experiment.plan.pp > 1:
        layers_of_stage(experiment)


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
    """PlanError for stages and for --partitioner auto with an indexer."""
    plan, model = experiment.plan, experiment.model
    if not (has_sparse_latents(model) or isinstance(model.attention, CompressedAttention)):
        return
    if plan.pp > 1:
        raise PlanError(
            f"plan '{plan}': --frontend torchxla does not split the indexer of {model.name} by pp. Use a plan "
            "without pp, or --frontend jax."
        )
    if experiment.program.partitioner is Partitioner.AUTO:
        raise PlanError(
            f"--partitioner auto: --frontend torchxla replaces the attention of {model.name}, whose indexer "
            "scatters positions one by one. Use --partitioner manual, or --frontend jax."
        )


def layers_of_stage(experiment: Experiment) -> int:
    """Layers per stage; PlanError if stages differ, or if a bias would be added more than once."""
    plan, model = experiment.plan, experiment.model
    attention = model.attention
    has_bias = attention.has_o_bias if isinstance(attention, GroupedAttention) else False
    has_bias |= isinstance(attention, LatentAttention) and attention.has_bias
    if plan.tp > 1 and (has_bias or model.has_mlp_bias):
        raise PlanError(
            f"plan '{plan}': with pp, --frontend torchxla reduces the outputs of modules over tp, which "
            f"would add the biases of {model.name} {plan.tp} times. Use a plan without tp or pp, or "
            "--frontend jax."
        )
    if has_linear_attention(model):
        raise PlanError(
            f"plan '{plan}': with pp, --frontend torchxla has one kind of attention in all layers, but "
            f"{model.name} has linear attention in some. Use a plan without pp, or --frontend jax."
        )
    difference = DIFFERENCES.get(model.family)
    if difference is not None:
        raise PlanError(
            f"plan '{plan}': with pp, layers of --frontend torchxla differ in their windows only, but those of "
            f"{model.name} also differ in {difference}. Use a plan without pp, or --frontend jax."
        )
    if model.family is Family.PHI3 and plan.tp > 1:
        raise PlanError(
            f"plan '{plan}': with pp and tp, --frontend torchxla has a share of the heads on each device, but "
            f"transformers separates queries, keys and values of {model.name} by the number of all heads. Use a "
            "plan without tp or pp, or --frontend jax."
        )
    stages = stage_layers(model.n_layers, plan.pp)
    # Windows are data of a stage (`stages.py`), other differences are not.
    kinds = [
        tuple(replace(model.layers[index], attention=AttentionKind.FULL) for index in indices)
        for indices in stages
    ]
    if len(set(kinds)) > 1:
        sizes = ", ".join(_stage_words(layers) for layers in kinds)
        raise PlanError(
            f"plan '{plan}': --frontend torchxla traces one program for all stages, but the stages of "
            f"{model.name} differ ({sizes}). Use a pp that divides layers of one kind, --layers, or "
            "--frontend jax."
        )
    return len(stages[0])


def _stage_words(layers: Sequence[Layer]) -> str:
    """The number of layers, and how many of them are dense if others have experts."""
    n_dense = sum(layer.mlp is MlpKind.DENSE for layer in layers)
    return f"{len(layers)} layers" + (f" with {n_dense} dense" if n_dense < len(layers) else "")
