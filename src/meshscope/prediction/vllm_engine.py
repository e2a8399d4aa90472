"""Where devices meet in vLLM 0.8.5 (V0 engine) under tensor and pipeline parallelism.

Counts and shapes are those that Xu et al. measured ("Characterizing Communication Patterns in
Distributed Large Language Model Inference", Tables III to VI); what those tables do not count, the
broadcast of a step's inputs and the messages between CPUs, is left out. All sequences are prefilled
in one step. `docs/paper.md` tells where the paper contradicts itself.
"""

from collections.abc import Iterator

from meshscope.errors import PlanError
from meshscope.events.enums import Kind, Part
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStep, Stage
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import GroupedAttention, Model
from meshscope.spec.plan.mesh import Groups
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.stages import stage_layers

# A stage hands on `hidden_states` and `residual` (vllm/model_executor/models/llama.py).
N_BOUNDARY_TENSORS = 2

# DEFAULT_VOCAB_PADDING_SIZE (vllm/model_executor/layers/vocab_parallel_embedding.py).
VOCAB_MULTIPLE = 64


def stored_vocab(model: Model) -> int:
    """Rows of vLLM's embedding: the vocabulary padded to a multiple of 64."""
    return -(-model.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def vllm_stages(experiment: Experiment, step: PlannedStep) -> tuple[Stage, ...]:
    """The meetings of one step, for one worker of each pipeline stage."""
    _check_plan(experiment.model, experiment.plan)
    plan = experiment.plan
    return tuple(
        Stage(
            before=tuple(_entry(experiment, step, index)),
            layers=tuple((layer, tuple(_layer(experiment, step, index))) for layer in layers),
            after=tuple(_exit(experiment, step, index)),
            index=index if plan.pp > 1 else None,
        )
        for index, layers in enumerate(stage_layers(experiment.model.n_layers, plan.pp))
    )


def _check_plan(model: Model, plan: Plan) -> None:
    """PlanError where vLLM's own assertions would fail."""
    if model.moe is not None or not isinstance(model.attention, GroupedAttention):
        raise PlanError(
            f"--engine vllm knows the conventions of dense models with grouped attention, as the paper "
            f"measured them; {model.name} is {model.family}. Use --engine meshscope."
        )
    if stored_vocab(model) % plan.tp:
        raise PlanError(
            f"plan '{plan}': vLLM pads the vocabulary of {model.name} to {stored_vocab(model)}, "
            f"which is not divisible by tp={plan.tp}. Use a tp that divides it, e.g. a power of two up to 64."
        )
    if plan.pp > 1 and model.hidden % plan.tp:
        raise PlanError(
            f"plan '{plan}': a stage hands on [tokens, hidden / tp], and hidden={model.hidden} of "
            f"{model.name} is not divisible by tp={plan.tp}. Use a tp that divides it, or pp=1."
        )


def _entry(experiment: Experiment, step: PlannedStep, stage: int) -> Iterator[PlannedCollective]:
    """The first stage embeds; another receives a slice of each tensor and puts the slices together."""
    if stage == 0:
        yield from _tp(
            experiment, stage, Part.EMBED, Kind.ALL_REDUCE, _hidden_states(experiment, step)
        )
        return
    yield _boundary(experiment, step, Kind.RECV, stage - 1)
    yield from _tp(
        experiment,
        stage,
        Part.STAGE,
        Kind.ALL_GATHER,
        _hidden_states(experiment, step),
        count=N_BOUNDARY_TENSORS,
    )


def _layer(experiment: Experiment, step: PlannedStep, stage: int) -> Iterator[PlannedCollective]:
    """The two row-parallel products of a layer end in a sum over tp."""
    for part in (Part.ATTN, Part.MLP):
        yield from _tp(experiment, stage, part, Kind.ALL_REDUCE, _hidden_states(experiment, step))


def _exit(experiment: Experiment, step: PlannedStep, stage: int) -> Iterator[PlannedCollective]:
    """The last stage gathers the last token's logits to one worker; another sends its tensors on.

    The payload of the gather is what one worker gives, as the paper counts it.
    """
    if stage < experiment.plan.pp - 1:
        yield _boundary(experiment, step, Kind.SEND, stage)
        return
    batch, share = experiment.workload.batch, stored_vocab(experiment.model) // experiment.plan.tp
    logits = (share,) if batch == 1 else (batch, share)
    yield from _tp(experiment, stage, Part.LM_HEAD, Kind.GATHER, logits)


def _hidden_states(experiment: Experiment, step: PlannedStep) -> tuple[int, int]:
    """[tokens, hidden]: vLLM lays the tokens of all sequences in one row."""
    return (experiment.workload.batch * step.n_tokens, experiment.model.hidden)


def _workers(plan: Plan) -> Groups:
    """The tp workers of each stage; one group a stage, of one device where tp is 1."""
    return plan.mesh.groups("tp")


def _tp(  # noqa: PLR0913  a meeting's own fields
    experiment: Experiment,
    stage: int,
    part: Part,
    kind: Kind,
    shape: tuple[int, ...],
    *,
    count: int = 1,
) -> Iterator[PlannedCollective]:
    """A meeting of the tp workers of a stage; none where tp is 1."""
    if experiment.plan.tp > 1:
        yield PlannedCollective(
            part=part,
            kind=kind,
            axis="tp",
            groups=(_workers(experiment.plan)[stage],),
            shape=shape,
            dtype=experiment.workload.activation_dtype,
            count=count,
        )


def _boundary(
    experiment: Experiment, step: PlannedStep, kind: Kind, sender: int
) -> PlannedCollective:
    """Each worker of stage `sender` hands its slice of both tensors to its peer in the next stage."""
    workers = _workers(experiment.plan)
    n_tokens, hidden = _hidden_states(experiment, step)
    return PlannedCollective(
        part=Part.STAGE,
        kind=kind,
        axis="pp",
        groups=tuple(zip(workers[sender], workers[sender + 1], strict=True)),
        shape=(n_tokens, hidden // experiment.plan.tp),
        dtype=experiment.workload.activation_dtype,
        count=N_BOUNDARY_TENSORS,
    )
