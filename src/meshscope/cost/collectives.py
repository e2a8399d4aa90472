"""Closed-form prediction of the collectives of a plan, and of vLLM 0.8.5 (V0 engine), without JAX or a compiler.

Counts and shapes of vLLM under tensor and pipeline parallelism were measured by Xu et al. ("Characterizing
Communication Patterns in Distributed Large Language Model Inference", Tables III to VI). The broadcast of a
step's inputs and messages between CPUs, which those tables do not count, are left out. One step prefills all
sequences. `docs/evidence/paper.md` lists where the paper contradicts itself.
"""

from collections.abc import Collection, Iterator
from itertools import repeat
from typing import assert_never

from meshscope.cost.meshscope_engine import meshscope_stages
from meshscope.cost.planned import PlannedCollective, PlannedStage
from meshscope.errors import PlanError
from meshscope.events.collective import Collective, Groups, predicted_collective
from meshscope.events.enums import Kind, Part, Phase
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.program import Engine
from meshscope.plans.stages import stage_layers
from meshscope.serialize import picked

# A stage sends `hidden_states` and `residual` (vllm/model_executor/models/llama.py).
N_BOUNDARY_TENSORS = 2

# DEFAULT_VOCAB_PADDING_SIZE (vllm/model_executor/layers/vocab_parallel_embedding.py).
VOCAB_MULTIPLE = 64


def predict(experiment: Experiment) -> list[Collective]:
    """All collectives of the request in program order, under the experiment's engine conventions.

    In a pipeline, the rows of a stage describe one of its devices.
    """
    return [
        row
        for phase in experiment.phases
        for stage in planned_stages(experiment, phase, is_cut=experiment.prefill_chunks.is_cut)
        for row in _rows(stage, phase, experiment)
    ]


def planned_stages(
    experiment: Experiment, phase: Phase, *, is_cut: bool, chosen: Collection[int] | None = None
) -> tuple[PlannedStage, ...]:
    """The collectives of one step, per pipeline stage; in decode, each token counts as a separate sequence.

    `is_cut` if a chunk of prefill is a part of a prompt. With `chosen`, meshscope's engine lists those layers only.
    """
    match experiment.engine:
        case Engine.MESHSCOPE:
            return meshscope_stages(experiment, phase, is_cut=is_cut, chosen=chosen)
        case Engine.VLLM:
            return vllm_stages(experiment.by_token, phase)
        case _:
            assert_never(experiment.engine)


def _rows(stage: PlannedStage, phase: Phase, experiment: Experiment) -> Iterator[Collective]:
    placed: dict[int, Groups] = {}  # by the identity of the groups of positions
    n_steps = 1 if phase is Phase.PREFILL else experiment.workload.n_decode_steps
    mesh = experiment.mesh
    for layer, collectives in ((None, stage.before), *stage.layers, (None, stage.after)):
        for planned in collectives:
            key = id(planned.groups)
            if key not in placed:
                placed[key] = mesh.devices_at(planned.groups)
            yield predicted_collective(
                phase=phase,
                layer=layer,
                groups=placed[key],
                **picked(planned, "part", "kind", "axis", "dtype", "shape", "count"),
                **picked(planned, "carried_bytes", "executed_as"),
                n_steps=n_steps,
                stage=stage.index,
                crosses_slices=experiment.topology.crosses_slices(placed[key]),
            )


def stored_vocab(model: Model) -> int:
    """Rows of vLLM's embedding: the vocabulary padded to a multiple of 64."""
    return -(-model.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def vllm_stages(experiment: Experiment, phase: Phase) -> tuple[PlannedStage, ...]:
    """The collectives of one step, for one worker of each pipeline stage."""
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    _check_plan(model, plan)
    # vLLM flattens the tokens of all sequences into one dimension.
    hidden_states = (workload.batch * experiment.n_positions(phase), model.hidden)
    share = (stored_vocab(model) // plan.tp,)
    sums = dict.fromkeys((Part.EMBED, Part.ATTN, Part.MLP), (Kind.ALL_REDUCE, hidden_states))
    # A later stage all-gathers the slices that it receives. The last one gathers the last token's logits on one worker:
    # the payload of the gather is one worker's shard, as in the paper.
    logits = (Kind.GATHER, share if workload.batch == 1 else (workload.batch, *share))
    over_tp = {**sums, Part.STAGE: (Kind.ALL_GATHER, hidden_states), Part.LM_HEAD: logits}
    workers, dtype = plan.mesh.groups("tp"), workload.activation_dtype

    def of(part: Part, stage: int) -> tuple[PlannedCollective, ...]:
        """The collective of a part over the tp workers of a stage; none if tp=1."""
        kind, shape = over_tp[part]
        collective = PlannedCollective(
            part=part,
            kind=kind,
            axis="tp",
            groups=(workers[stage],),
            shape=shape,
            dtype=dtype,
            count=N_BOUNDARY_TENSORS if part is Part.STAGE else 1,
        )
        return (collective,) if plan.tp > 1 else ()

    def boundary(kind: Kind, sender: int) -> PlannedCollective:
        """Each worker of stage `sender` sends its slice of both tensors to its peer in the next stage."""
        return PlannedCollective(
            part=Part.STAGE,
            kind=kind,
            axis="pp",
            groups=tuple(zip(workers[sender], workers[sender + 1], strict=True)),
            shape=(hidden_states[0], model.hidden // plan.tp),
            dtype=dtype,
            count=N_BOUNDARY_TENSORS,
        )

    def entry(stage: int) -> tuple[PlannedCollective, ...]:
        received = () if stage == 0 else (boundary(Kind.RECV, stage - 1),)
        return (*received, *of(Part.STAGE if stage else Part.EMBED, stage))

    return tuple(
        PlannedStage(
            before=entry(stage),
            layers=tuple(zip(layers, repeat((*of(Part.ATTN, stage), *of(Part.MLP, stage))))),
            after=of(Part.LM_HEAD, stage)
            if stage == plan.pp - 1
            else (boundary(Kind.SEND, stage),),
            index=stage if plan.pp > 1 else None,
        )
        for stage, layers in enumerate(stage_layers(model.n_layers, plan.pp))
    )


def _check_plan(model: Model, plan: Plan) -> None:
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
    vocab = stored_vocab(model)
    if vocab % plan.tp:
        raise PlanError(
            f"plan '{plan}': tp={plan.tp} does not divide {vocab}, the vocabulary of "
            f"{model.name} as padded by vLLM. Use a tp that divides it, e.g. a power of two up to 64."
        )
    if plan.pp > 1 and model.hidden % plan.tp:
        raise PlanError(
            f"plan '{plan}': tp={plan.tp} does not divide hidden={model.hidden} of {model.name}, but "
            f"vLLM stages send [tokens, hidden / tp]. Use a tp that divides it, or pp=1."
        )
