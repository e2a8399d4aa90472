"""The engines of a plan on a slice, with the limits and terms of a serving engine or of an ideal one."""

from dataclasses import replace
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
_TERMS = (
    *("max_sequences", "max_step_tokens", "reserved_frac", "has_mixed_steps", "token_bucket"),
    *("host_s", "host_sequence_s", "host_request_s", "hides_host", "holds_prompts", "attention"),
)


def engine_policy(
    experiment: Experiment, engine: ServingEngine | None, **given: Any
) -> EnginePolicy:
    """The policy of a serving engine, or of an ideal one, with the limits that are given."""
    if engine is None:
        return EnginePolicy(**given)
    plan, is_dense = experiment.plan, experiment.model.moe is None
    return EnginePolicy(
        **{**picked(engine, *_TERMS), **given},
        # Sequences that pad a step are alike, and read no experts that others do not.
        sequence_bucket=engine.sequence_bucket if is_dense else None,
        steps_together=True,
        gathers_tokens=engine.gathers_tokens and not is_dense and plan.ep > plan.tp,
    )


def engine_blocks(
    experiment: Experiment, engine: ServingEngine | None, memory_frac: float | None = None
) -> CacheBlocks:
    """The blocks of the cache of each engine, in the layout of its release; SpecError if the weights leave no room."""
    if memory_frac is None:
        memory_frac = MEMORY_FRAC if engine is None else engine.memory_frac
    block_tokens = BLOCK_TOKENS if engine is None else engine.page_tokens
    is_tpu = experiment.topology.chip.kind is ChipKind.TPU
    layout = CacheLayout(engine.name) if engine is not None and is_tpu else None
    return cache_blocks(
        experiment, memory_frac=memory_frac, block_tokens=block_tokens, layout=layout
    )


def placed_pool(  # noqa: PLR0913  what an instance is made of
    experiment: Experiment,
    policy: EnginePolicy,
    blocks: CacheBlocks,
    *,
    max_context: int,
    profile: ChipProfile | None = None,
    n_instances: int = 1,
) -> PlacedPool:
    """The engines of the instances: one for each data-parallel rank and stage of a pipeline."""
    if policy.gathers_tokens and experiment.program.dispatch is DispatchForm.AUTO:
        program = replace(experiment.program, dispatch=DispatchForm.ALLGATHER)
        experiment = replace(experiment, program=program)
    costs = tabulated_costs(
        experiment,
        max_sequences=bucket(policy.max_sequences, policy.sequence_bucket),
        max_step_tokens=bucket(policy.max_step_tokens, policy.token_bucket),
        max_context=max_context,
        profile=profile,
        attention=policy.attention,
    )
    n_engines = n_instances * experiment.plan.data_size * experiment.plan.pp
    pool = EnginePool(n_engines=n_engines, costs=costs, blocks=blocks, policy=policy)
    return PlacedPool(experiment=experiment, n_instances=n_instances, pool=pool)


def served_pool(
    experiment: Experiment,
    engine: ServingEngine | None,
    *,
    max_context: int,
    profile: ChipProfile | None = None,
    **limits: Any,
) -> PlacedPool:
    """One instance with the engine's defaults, but for the limits that are given."""
    return placed_pool(
        experiment,
        engine_policy(experiment, engine, **limits),
        engine_blocks(experiment, engine),
        max_context=max_context,
        profile=profile,
    )
