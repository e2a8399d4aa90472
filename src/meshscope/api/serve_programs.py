"""`serve-sim --compile`: the steps of a simulated server take the times of programs compiled for its sizes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from meshscope.api.compile import compilable_experiment
from meshscope.api.console import WorkProgress
from meshscope.api.request import CompileRequest
from meshscope.backends.compile.compile import compile_experiment
from meshscope.events.enums import Phase
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.serving.simulation import PlacedPool
from meshscope.serving.step_costs import LoadedPrograms
from meshscope.store.folder import scratch_folder


def with_programs(
    placed: PlacedPool,
    prompt: int,
    options: dict[str, Any],
    profile: ChipProfile | None,
) -> PlacedPool:
    """The engines with the step times of compiled programs, of the sizes that earlier simulations reached.

    `options` are those of `compile`; decode programs have caches of `prompt` tokens, or as long as all fit.
    """
    pool, plan = placed.pool, placed.experiment.plan
    n_shards = plan.cp * (plan.tp if plan.sp else 1)
    asked: dict[str, Any] = {
        "topology": placed.experiment.topology.name,
        "plan": str(plan),
        **options,
    }
    ratios = dict[Phase, dict[int, float]]()
    code_bytes, temp_bytes, program = 0, 0, placed.experiment.program
    with WorkProgress() as progress:
        for phase, n in _sizes(pool.costs.reached):
            is_decode = phase is Phase.DECODE
            n_tokens = min(prompt, pool.blocks.n_tokens // n) if is_decode else n
            request = CompileRequest(
                batch=plan.data_size * (n if is_decode else 1),
                prompt=max(n_tokens // n_shards, 1) * n_shards,
                output=2 if is_decode else 1,
                prefill_chunk="off",
                **asked,
            )
            experiment, _ = compilable_experiment(request)
            program, where = experiment.program, f"{phase} of {n:,}"
            with scratch_folder() as folder:
                compiled = compile_experiment(
                    experiment,
                    folder,
                    progress=lambda _, step, left_s, where=where: progress(where, step, left_s),
                    chip_profile=profile,
                    phases=(phase,),
                )
            if is_decode:  # with its own position, as the one step of two output tokens
                closed_s = pool.costs.decode_step_s(n, request.prompt + 1)
            else:
                closed_s = pool.costs.mixed_s(0, 0.0, request.prompt, 0.0)
            of_phase = ratios.setdefault(phase, {})
            of_phase[n] = compiled.times[0].step.value_s / closed_s
            temporary = compiled.memory.temp_bytes
            assert compiled.code_bytes is not None  # of a program compiled by this version
            assert temporary is not None
            code_bytes, temp_bytes = code_bytes + compiled.code_bytes, max(temp_bytes, temporary)
    programs = LoadedPrograms(
        name=" ".join(filter(None, (program.frontend, program.engine_version))),
        ratios=ratios,
        code_bytes=code_bytes,
        temp_bytes=temp_bytes,
        resident_bytes=pool.blocks.resident_bytes,
        hbm_bytes=placed.experiment.topology.chip.device_hbm_bytes,
    )
    costs = pool.costs.scaled(ratios)
    return replace(placed, pool=replace(pool, costs=costs), programs=programs)


def _sizes(reached: Iterable[tuple[Phase, int]]) -> Iterator[tuple[Phase, int]]:
    """The powers of two up to the one that holds the largest size of a phase, from the one that holds its smallest."""
    for phase in (Phase.DECODE, Phase.PREFILL):
        sizes = [n for of, n in reached if of is phase]
        if sizes:
            first, last = ((n - 1).bit_length() for n in (min(sizes), max(sizes)))
            yield from ((phase, 1 << power) for power in range(first, last + 1))
