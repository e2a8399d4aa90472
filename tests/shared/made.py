"""What many tests make: a tiny config, experiments, rows and step times, with all that a test does not vary."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshscope.cost.closed_form import PlanForm, closed_steps, plan_batch, plan_form
from meshscope.events.collective import Collective, predicted_collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeEstimate
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.program import Engine, Program
from meshscope.plans.workload import Workload
from meshscope.serving.space import SearchSpace, parse_batches
from meshscope.store.run import RunRecord

# Flags of XLA for programs that run a few times: optimizing them takes longer than that saves.
UNOPTIMIZED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
}


def experiment_with(
    model: Model | str,
    plan: Plan | str,
    topology: Topology | str,
    *,
    program: Program | None = None,
    engine: Engine = Engine.MESHSCOPE,
    n_layers: int | None = None,
    workload: Workload | None = None,
    **sizes: Any,
) -> Experiment:
    """An experiment; `sizes` are those of its workload."""
    return experiment_of(
        model=read_model(model) if isinstance(model, str) else model,
        plan=parse_plan(plan) if isinstance(plan, str) else plan,
        topology=parse_topology(topology) if isinstance(topology, str) else topology,
        workload=workload or Workload(**sizes),
        program=program,
        engine=engine,
        n_layers=n_layers,
    )


def space_with(
    model: str,
    topology: str,
    *,
    batch: str | None = None,
    dtypes: Sequence[str] = ("bf16",),
    **changes: Any,
) -> SearchSpace:
    """What a search varies for prompts of 1,024 and outputs of 128 tokens."""
    usual = {
        "model": read_model(model),
        "topology": parse_topology(topology),
        "workload": Workload(batch=1, prompt=1024, output=128),
        "batches": parse_batches(batch),
        "weight_dtypes": tuple(dtypes),
        "cache_dtypes": tuple(dtypes),
    }
    return SearchSpace(**(usual | changes))


def closed(forms: Sequence[PlanForm], at: Sequence[int] = (0,), **sizes: Sequence[float]) -> Any:
    """The closed form of the forms at these indices, for batch, prompt, output and perhaps chunk."""
    arrays = {name: np.array(values, float) for name, values in sizes.items()}
    return closed_steps(plan_batch(list(forms)), np.array(at), **arrays)


def closed_of(experiment: Experiment, phase: Phase, **options: Any) -> tuple[PlanForm, Any]:
    """The form of a phase, and its closed form for the workload."""
    form, workload = plan_form(experiment, phase, **options), experiment.workload
    sizes = {name: [getattr(workload, name)] for name in ("batch", "prompt", "output")}
    return form, closed([form], **sizes)


def collective(kind: Kind, shape: tuple[int, ...], **facts: Any) -> Collective:
    """A predicted row of bf16 over tp=4, in the MLP of the first layer in prefill."""
    usual = {"phase": Phase.PREFILL, "layer": 0, "part": Part.MLP, "axis": "tp"}
    usual |= {"groups": ((0, 1, 2, 3),), "dtype": "bf16"}
    return predicted_collective(kind=kind, shape=shape, **(usual | facts))


def estimate(value_s: float, low_s: float | None = None, high_s: float | None = None):
    return TimeEstimate(value_s=value_s, low_s=low_s, high_s=high_s)


def part_cost(part: str | None, compute_s: float, **facts: Any) -> PartCost:
    """A part without collectives."""
    return PartCost(
        **{"part": part, "compute_s": compute_s, "collective_s": 0.0, "exposed_s": 0.0} | facts
    )


def step_time(phase: Phase, step: TimeEstimate, compute_s: float, **facts: Any) -> StepTime:
    """A compiled step that neither communicates nor waits."""
    usual = {"source": Source.COMPILED, "exposed_s": 0.0, "idle_s": 0.0, "bubble_s": 0.0}
    usual |= {"collective_s": 0.0, "exposed_by_axis_s": {}, "by_basis_s": {}, "parts": ()}
    return StepTime(phase=phase, step=step, compute_s=compute_s, **(usual | facts))


def varied(
    run: RunRecord,
    *,
    experiment: Mapping[str, Any] = {},
    manifest: Mapping[str, Any] = {},
    **changes: Any,
) -> RunRecord:
    """A run with other fields, also in its experiment and its manifest."""
    record = replace(run.manifest.experiment, **experiment)
    return replace(
        run, manifest=replace(run.manifest, **{"experiment": record, **manifest}), **changes
    )


def of_source(
    run: RunRecord, source: Source, rows: Iterable[Collective] | None = None
) -> RunRecord:
    """A run whose rows, or copies of these beside its own, have another source."""
    copies = tuple(replace(row, source=source) for row in (run.rows if rows is None else rows))
    return varied(
        run, manifest={"source": source}, rows=copies if rows is None else (*run.rows, *copies)
    )
