"""Reads the programs of a serving engine's step: their collectives, and the time of the whole step."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from meshscope.backends.compile.files import program_file
from meshscope.cost.chunk_times import prefill_time, summed_time
from meshscope.cost.expert_load import expert_load
from meshscope.cost.steps import TimedStep, timed_step
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.plans.sequence_lengths import SequenceLengths, sequence_lengths
from meshscope.programs.engines.step_names import STEP_PROGRAMS
from meshscope.programs.frontends import frontend_of
from meshscope.readers.hlo.collectives import (
    ModuleCollectives,
    module_collectives,
    n_steps_of,
    rows_of,
)
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.scopes import with_scopes


def read_engine_phase(
    experiment: Experiment,
    phase: Phase,
    hlo_dir: Path,
    *,
    chip_profile: ChipProfile | None,
    notes: tuple[str, ...],
) -> tuple[list[Collective], StepTime, tuple[TimedStep, ...]]:
    """The rows and the time of a phase, and its programs on their timeline.

    All chunks of prefill run the same programs; kernels that read the cache take longer in later ones.
    """
    chunks, n_chunks = experiment.prefill_chunks, experiment.n_chunks(phase)
    report = json.loads((hlo_dir / f"{phase}.json").read_text(encoding="utf-8"))
    mesh = replace(experiment.plan.mesh, order=tuple(report["order"]))
    tables = [
        module_collectives(
            _with_parts(experiment, read_hlo(hlo_dir / program_file(phase, name))),
            mesh=mesh,
            crosses_slices=experiment.crosses_slices,
        )
        for name in report.get("programs", STEP_PROGRAMS)  # reports up to version 0.1 lack it
    ]
    last = sequence_lengths(experiment, phase)
    first = replace(last, n_keys=float(last.n_queries))
    is_cut = phase is Phase.PREFILL and chunks.n_position_chunks > 1
    steps = [
        tuple(_timed(experiment, phase, tables, lengths, chip_profile=chip_profile, notes=notes))
        for lengths in ((first, last) if is_cut else (last,))
    ]
    times = [summed_time([program.time for program in step]) for step in steps]
    rows = [
        replace(row, count=row.count * n_chunks)
        for table, program in zip(tables, steps[-1], strict=True)
        for row in _rows(experiment, phase, table, program)
    ]
    if n_chunks == 1:
        return rows, times[0], steps[0]
    return rows, prefill_time(times, chunks), steps[-1]


def _with_parts(experiment: Experiment, module: HloModule) -> HloModule:
    """The module with scopes: those that its front end entered, else those that its names imply."""
    return with_scopes(module) if frontend_of(experiment).implies_scopes else module


def _timed(  # noqa: PLR0913  programs, their hardware and their profile
    experiment: Experiment,
    phase: Phase,
    tables: Sequence[ModuleCollectives],
    lengths: SequenceLengths,
    *,
    chip_profile: ChipProfile | None,
    notes: tuple[str, ...],
) -> Iterator[TimedStep]:
    """The programs of a step, one after the other; the first one has the notes."""
    programs = [
        timed_step(
            table.flow.module,
            table,
            phase=phase,
            topology=experiment.topology,
            chip_profile=chip_profile,
            experts=expert_load(experiment, phase),
            lengths=(lengths,),
            notes=() if number else notes,
        )
        for number, table in enumerate(tables)
    ]
    starts = accumulate((p.time.step.value_s for p in programs), initial=0.0)
    for program, start_s in zip(programs, starts, strict=False):
        yield replace(program, start_s=start_s)


def _rows(
    experiment: Experiment, phase: Phase, table: ModuleCollectives, program: TimedStep
) -> Iterator[Collective]:
    """The rows of a program, at their times in the step."""
    rows = rows_of(
        table,
        n_steps_of=n_steps_of(experiment),
        crosses_slices=experiment.crosses_slices,
        default_phase=phase,
    )
    for row in program.rows(rows):
        start_s = None if row.start_s is None else row.start_s + program.start_s
        yield replace(row, start_s=start_s)
