"""Reads HLO text dumped by other tools: its collectives and, for whole TPU modules, step times."""

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
    """The collectives of imported programs, and the step times that could be estimated."""

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
    """The rows and step times of the modules; `phase` applies to modules whose scopes name none.

    A dump does not show the number of steps in a request, so each phase counts as one step. A step
    gets a time if a single whole TPU module contains it and no other phase.
    """
    collectives = [
        module_collectives(m, mesh=plan.mesh, crosses_slices=topology.crosses_slices)
        for m in modules
    ]
    tables = [
        rows_of(
            of_module,
            n_steps_of=dict.fromkeys(Phase, 1),
            crosses_slices=topology.crosses_slices,
            default_phase=phase,
        )
        for of_module in collectives
    ]
    phases = [{row.phase for row in table} or {phase} for table in tables]
    n_modules = Counter(phase for of_module in phases for phase in of_module)
    rows: list[Collective] = []
    steps: list[TimedStep] = []
    for module, of_module, table, (first, *others) in zip(
        modules, collectives, tables, phases, strict=True
    ):
        is_shared = bool(others) or n_modules[first] > 1
        if first is None or is_shared or not _has_time(module, topology):
            rows += table
            continue
        step = timed_step(
            module, of_module, phase=first, topology=topology, chip_profile=chip_profile
        )
        rows += step.rows(table)
        steps.append(step)
    return ImportedPrograms(rows=rows, steps=tuple(steps))


def _has_time(module: HloModule, topology: Topology) -> bool:
    is_whole = module.cut_off_at is None
    return is_whole and module.is_scheduled and topology.chip.kind is ChipKind.TPU
