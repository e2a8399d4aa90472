"""The collectives of one phase of an experiment."""

from dataclasses import replace

from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.module import HloModule
from meshscope.spec.experiment import Experiment


def phase_collectives(experiment: Experiment, phase: Phase, module: HloModule) -> list[Collective]:
    """The rows of a phase, with the counts of all chunks of prefill."""
    rows = program_collectives(experiment, phase, module)
    n_chunks = experiment.n_chunks(phase)
    return [replace(row, count=row.count * n_chunks) for row in rows] if n_chunks > 1 else rows


def program_collectives(
    experiment: Experiment, phase: Phase, module: HloModule
) -> list[Collective]:
    """One row for each layer and operation of a phase's program, attributed to the plan."""
    return collectives_of(
        module,
        mesh=experiment.plan.mesh,
        n_steps_of=n_steps_of(experiment),
        crosses_slices=experiment.crosses_slices,
        default_phase=phase,
    )


def n_steps_of(experiment: Experiment) -> dict[Phase, int]:
    """The number of steps in a request, by phase."""
    return {Phase.PREFILL: 1, Phase.DECODE: experiment.workload.n_decode_steps}
