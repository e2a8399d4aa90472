"""Collectives of vLLM 0.8.5 (V0 engine) under tensor and pipeline parallelism.

Counts and shapes are those measured by Xu et al. ("Characterizing Communication Patterns in
Distributed Large Language Model Inference", Tables III to VI). The broadcast of a step's inputs and
messages between CPUs, which those tables do not count, are left out. One step prefills all
sequences. `docs/evidence/paper.md` lists where the paper contradicts itself.
"""

from collections.abc import Iterator

from meshscope.errors import PlanError
from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.stages import stage_layers
from meshscope.prediction.planned_collective import PlannedCollective, PlannedStage, PlannedStep

# A stage sends `hidden_states` and `residual` (vllm/model_executor/models/llama.py).
N_BOUNDARY_TENSORS = 2

# DEFAULT_VOCAB_PADDING_SIZE (vllm/model_executor/layers/vocab_parallel_embedding.py).
VOCAB_MULTIPLE = 64


def stored_vocab(model: Model) -> int:
    """Rows of vLLM's embedding: the vocabulary padded to a multiple of 64."""
    return -(-model.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def vllm_stages(experiment: Experiment, step: PlannedStep) -> tuple[PlannedStage, ...]:
    """The collectives of one step, for one worker of each pipeline stage."""
    _check_plan(experiment.model, experiment.plan)
    plan = experiment.plan
    return tuple(
        PlannedStage(
            before=tuple(_entry(experiment, step, index)),
            layers=tuple((layer, tuple(_layer(experiment, step, index))) for layer in layers),
            after=tuple(_exit(experiment, step, index)),
            index=index if plan.pp > 1 else None,
        )
        for index, layers in enumerate(stage_layers(experiment.model.n_layers, plan.pp))
    )


def _check_plan(model: Model, plan: Plan) -> None:
    """Raise PlanError if vLLM's assertions would fail."""
    if model.moe is not None or model.attention.mechanism is not Mechanism.GROUPED:
        raise PlanError(
            f"--engine vllm supports only dense models with grouped-query attention, the ones measured "
            f"in the paper; {model.name} is {model.family}. Use --engine meshscope."
        )
    if model.layer_inputs is not None:
        raise PlanError(
            f"--engine vllm predicts vLLM 0.8.5, which has no models with embeddings of each layer, such as "
            f"{model.name}. Use --engine meshscope."
        )
    if stored_vocab(model) % plan.tp:
        raise PlanError(
            f"plan '{plan}': tp={plan.tp} does not divide {stored_vocab(model)}, the vocabulary of "
            f"{model.name} as padded by vLLM. Use a tp that divides it, e.g. a power of two up to 64."
        )
    if plan.pp > 1 and model.hidden % plan.tp:
        raise PlanError(
            f"plan '{plan}': tp={plan.tp} does not divide hidden={model.hidden} of {model.name}, but "
            f"vLLM stages send [tokens, hidden / tp]. Use a tp that divides it, or pp=1."
        )


def _entry(experiment: Experiment, step: PlannedStep, stage: int) -> Iterator[PlannedCollective]:
    """The first stage embeds; later stages receive a slice of each tensor and all-gather it."""
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
    """An all-reduce after each of the two row-parallel matmuls of a layer."""
    for part in (Part.ATTN, Part.MLP):
        yield from _tp(experiment, stage, part, Kind.ALL_REDUCE, _hidden_states(experiment, step))


def _exit(experiment: Experiment, step: PlannedStep, stage: int) -> Iterator[PlannedCollective]:
    """The last stage gathers the last token's logits on one worker; other stages send.

    The payload of the gather is one worker's shard, as in the paper.
    """
    if stage < experiment.plan.pp - 1:
        yield _boundary(experiment, step, Kind.SEND, stage)
        return
    batch, share = experiment.workload.batch, stored_vocab(experiment.model) // experiment.plan.tp
    logits = (share,) if batch == 1 else (batch, share)
    yield from _tp(experiment, stage, Part.LM_HEAD, Kind.GATHER, logits)


def _hidden_states(experiment: Experiment, step: PlannedStep) -> tuple[int, int]:
    """[tokens, hidden]: vLLM flattens the tokens of all sequences into one dimension."""
    return (experiment.workload.batch * step.n_tokens, experiment.model.hidden)


def _workers(plan: Plan) -> Groups:
    """The tp workers of each stage, one group per stage."""
    return plan.mesh.groups("tp")


def _tp(  # noqa: PLR0913  the fields of a collective
    experiment: Experiment,
    stage: int,
    part: Part,
    kind: Kind,
    shape: tuple[int, ...],
    *,
    count: int = 1,
) -> Iterator[PlannedCollective]:
    """A collective of the tp workers of a stage; none if tp=1."""
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
    """Each worker of stage `sender` sends its slice of both tensors to its peer in the next stage."""
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
