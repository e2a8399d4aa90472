"""The engines of a plan on a slice, with the limits and terms of a serving engine or of an ideal one."""

from dataclasses import dataclass, replace
from typing import Any

from meshscope.hardware.chips import ChipKind
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.plans.caches import CacheLayout
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.serialize import picked
from meshscope.serving.engine import EnginePolicy, EnginePool, bucket
from meshscope.serving.servers import ServingEngine
from meshscope.serving.simulation import PlacedPool
from meshscope.serving.step_costs import BLOCK_TOKENS, CacheBlocks, cache_blocks, tabulated_costs

MEMORY_FRAC = 0.9  # of the HBM for weights and cache, in an ideal engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Instances of a server before the lengths of its load are known: plan, policy, and the cache of each engine."""

    experiment: Experiment
    policy: EnginePolicy
    blocks: CacheBlocks
    profile: ChipProfile | None
    n_instances: int

    def pool(self, max_context: int) -> PlacedPool:
        """The engines of the instances: one for each data-parallel rank and stage of a pipeline."""
        experiment, policy = self.experiment, self.policy
        fused = None
        if policy.gathers_tokens and experiment.program.dispatch is DispatchForm.AUTO:
            if policy.fused_from is not None:
                fused = replace(experiment.program, dispatch=DispatchForm.FUSED)
            program = replace(experiment.program, dispatch=DispatchForm.ALLGATHER)
            experiment = replace(experiment, program=program)
        costs = tabulated_costs(
            experiment,
            fused=None if fused is None else replace(experiment, program=fused),
            fused_from=policy.fused_from or 0,
            max_sequences=bucket(policy.max_sequences, policy.sequence_bucket),
            max_step_tokens=bucket(policy.max_step_tokens, policy.token_bucket),
            max_context=max_context,
            profile=self.profile,
            cache_reads=policy.cache_reads,
            **picked(policy, "attention", "experts", "offloads_from", "expert_popularity"),
        )
        n = self.n_instances * experiment.plan.data_size * experiment.plan.pp
        pool = EnginePool(n_engines=n, costs=costs, blocks=self.blocks, policy=policy)
        return PlacedPool(experiment=experiment, n_instances=self.n_instances, pool=pool)


def place_of(
    experiment: Experiment,
    engine: ServingEngine | None,
    *,
    memory_frac: float | None = None,
    profile: ChipProfile | None = None,
    n_instances: int = 1,
    **limits: Any,
) -> Place:
    """Instances of a serving engine, or of an ideal one, with the limits that are given.

    The cache has the layout of the engine's release; SpecError if the weights leave no room for it.
    """
    layout, block_tokens, default_frac = None, BLOCK_TOKENS, MEMORY_FRAC
    if engine is not None:
        plan, is_dense = experiment.plan, experiment.model.moe is None
        gathers = engine.gathers_tokens and not is_dense and plan.ep > plan.tp
        step_tokens = engine.rank_step_tokens if gathers else None
        limits = {
            **picked(engine, *EnginePolicy.__slots__),
            "host_s": engine.host_layer_s * len(experiment.model.layers),
            **({} if step_tokens is None else {"max_step_tokens": step_tokens}),
            **limits,
            # Sequences that pad a step are alike, and read no experts that others do not.
            "sequence_bucket": engine.sequence_bucket if is_dense else None,
            "steps_together": True,
            "gathers_tokens": gathers,
        }
        block_tokens, default_frac = engine.page_tokens, engine.memory_frac
        if experiment.topology.chip.kind is ChipKind.TPU:
            layout = CacheLayout(engine.name)
    frac = default_frac if memory_frac is None else memory_frac
    return Place(
        experiment=experiment,
        policy=EnginePolicy(**limits),
        blocks=cache_blocks(experiment, memory_frac=frac, block_tokens=block_tokens, layout=layout),
        profile=profile,
        n_instances=n_instances,
    )
