"""What somebody else's optimised HLO holds: rows, and the time of its step where that can be told."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshscope.cost.steps import TimedStep, timed_step
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.interconnect.profile import ChipProfile
from meshscope.readers.hlo.collectives import module_collectives, rows_of
from meshscope.readers.hlo.module import HloModule
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPrograms:
    """The collectives of programs that others compiled, with times where their steps have one."""

    rows: list[Collective]
    steps: tuple[TimedStep, ...]


def read_imported(
    modules: Sequence[HloModule],
    *,
    topology: Topology,
    plan: Plan,
    phase: Phase | None,
    chip_profile: ChipProfile | None = None,
) -> ImportedPrograms:
    """Rows and times of the modules; `phase` is that of a module whose scopes name none.

    How many steps a request takes is not in a dump: each phase counts as one step. A step's time
    is told for a whole scheduled module of a TPU that is all of its phase, of one phase alone.
    """
    founds = [
        module_collectives(m, mesh=plan.mesh, crosses_slices=topology.crosses_slices)
        for m in modules
    ]
    tables = [
        rows_of(
            found,
            n_steps_of=dict.fromkeys(Phase, 1),
            crosses_slices=topology.crosses_slices,
            default_phase=phase,
        )
        for found in founds
    ]
    phases = [{row.phase for row in rows} or {phase} for rows in tables]
    shares = Counter(phase for found in phases for phase in found)
    rows: list[Collective] = []
    steps: list[TimedStep] = []
    for module, found, own, names in zip(modules, founds, tables, phases, strict=True):
        (only, *others) = names
        is_shared = bool(others) or shares[only] > 1
        if only is None or is_shared or not _has_time(module, topology):
            rows += own
            continue
        step = timed_step(module, found, phase=only, topology=topology, chip_profile=chip_profile)
        rows += step.rows(own)
        steps.append(step)
    return ImportedPrograms(rows=rows, steps=tuple(steps))


def _has_time(module: HloModule, topology: Topology) -> bool:
    is_whole = module.cut_off_at is None
    return is_whole and module.is_scheduled and topology.chip.kind is ChipKind.TPU
