"""The collectives that a model's steps would execute, for the tokens of a trace's steps.

A server batches other requests in every step, so the prediction is of a step with the mean tokens
of the steps of its phase.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshscope.errors import MeshscopeError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.measured import StepClass
from meshscope.hardware.topology import Topology
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import Plan
from meshscope.plans.program import Engine, Program
from meshscope.plans.workload import Workload
from meshscope.prediction import predict

ASSUMED_DTYPE = "bf16"


def predicted_steps(
    steps: Sequence[StepClass], *, model: Model, plan: Plan, topology: Topology
) -> tuple[tuple[Collective, ...], list[str]]:
    """Predicted rows of a mean prefill and a mean decode step, and why one is missing."""
    rows: list[Collective] = []
    findings: list[str] = []
    for step in steps:
        phase = Phase(step.label.value) if step.label.value in set(Phase) else None
        if phase is None:
            continue
        tokens = sum(n or 0.0 for n in (step.prefill_tokens, step.decode_tokens))
        if not tokens:
            findings.append(f"{phase} steps: no prediction, as the trace does not say their tokens")
            continue
        try:
            experiment = _experiment(
                phase, round(tokens), model=model, plan=plan, topology=topology
            )
            predicted = predict(experiment)
        except MeshscopeError as error:
            findings.append(f"{phase} steps: no prediction: {error}")
            continue
        rows += [replace(row, n_steps=step.n_steps) for row in predicted if row.phase is phase]
    return tuple(rows), findings


def _experiment(
    phase: Phase, tokens: int, *, model: Model, plan: Plan, topology: Topology
) -> Experiment:
    """One step with these tokens: a prompt for each replica, or a token of each sequence."""
    n_replicas = plan.dp * plan.fsdp
    share = max(1, -(-tokens // n_replicas))
    is_prefill = phase is Phase.PREFILL
    workload = Workload(
        batch=n_replicas if is_prefill else share * n_replicas,
        prompt=share if is_prefill else 1,
        output=2,
        weight_dtype=ASSUMED_DTYPE,
        activation_dtype=ASSUMED_DTYPE,
        cache_dtype=ASSUMED_DTYPE,
    )
    for engine in (Engine.VLLM, Engine.MESHSCOPE):
        try:
            return experiment_of(
                model=model,
                plan=plan,
                topology=topology,
                workload=workload,
                program=Program(),
                engine=engine,
            )
        except MeshscopeError:
            if engine is Engine.MESHSCOPE:
                raise
    raise AssertionError
