"""Reads the programs of compiled phases: their collectives, and the time of a step over all chunks."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshscope.cost.expert_load import expert_load
from meshscope.cost.row_times import deep_rows
from meshscope.cost.steps import TimedStep, placed_chunks, prefill_time, summed_time, timed_step
from meshscope.errors import CompileError
from meshscope.events.collective import Collective, OtherOperation
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.hardware.chips import ChipKind, precision_notes
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.model.layers import ShallowLayers
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Partitioner
from meshscope.programs.frontends import STEP_PROGRAMS, frontend_of, program_file
from meshscope.readers.hlo.collectives import (
    ModuleCollectives,
    module_collectives,
    n_steps_of,
    program_collectives,
)
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.hlo.scopes import with_scopes

FIRST_CHUNK = "first_chunk"  # folder of the first chunk of a prompt, next to the last one
UNROLLED = "unrolled"  # folder of the shallow programs, next to the full ones


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrograms:
    """What programs say: their collectives, the times of their phases, and the programs on their timeline.

    `others` are the operations of imported programs without rows that may communicate, and host transfers.
    """

    rows: list[Collective]
    times: tuple[StepTime, ...]
    steps: tuple[TimedStep, ...]
    others: tuple[OtherOperation, ...] = ()


def read_chunks(
    experiment: Experiment,
    phase: Phase,
    hlo_dir: Path,
    *,
    layers: ShallowLayers | None = None,
    chip_profile: ChipProfile | None = None,
) -> ReadPrograms:
    """The collectives of one phase with their times, and the time of its step, over all chunks.

    `layers` are the layers of the shallow programs, whose times represent all layers. A measured
    `chip_profile` replaces the published constants.
    """
    if experiment.program.frontend.is_served:
        return _read_engine(experiment, phase, hlo_dir, layers, chip_profile)
    is_cut = len(experiment.programs(phase)) > 1
    folders = (hlo_dir / FIRST_CHUNK, hlo_dir) if is_cut else (hlo_dir,)
    read = [
        read_phase(experiment, phase, folder / program_file(phase), layers, chip_profile)
        for folder in folders
    ]
    rows, steps = read[-1][0], [step for _, step in read]
    n_chunks, chunks = experiment.n_chunks(phase), experiment.prefill_chunks
    if n_chunks == 1:
        return ReadPrograms(rows=rows, times=(steps[0].time,), steps=tuple(steps))
    names = ("layer", "part", "kind", "axis", "groups", "dtype", "shape", "count")
    first, *_, last = (
        Counter(tuple(getattr(row, name) for name in names) for row in rows)
        for rows, _ in (*read, *read)
    )
    n_end = experiment.model.n_replayed
    if first != last if n_end is None else first - last:
        raise CompileError(
            f"--prefill-chunk {experiment.workload.prefill_chunk or 'auto'}: the programs of the first and the "
            "last chunk have different collectives, so those between are unknown. Use another chunk, or "
            "--prefill-chunk off."
        )

    def n_times(row: Collective) -> int:
        is_of_all = tuple(getattr(row, name) for name in names) in first
        return n_chunks if is_of_all else chunks.n_sequence_chunks

    return ReadPrograms(
        rows=[replace(row, count=row.count * n_times(row)) for row in rows],
        times=(prefill_time([step.time for step in steps], chunks, ends_alike=n_end is None),),
        steps=placed_chunks(steps, chunks, ends_alike=n_end is None),
    )


def read_phase(
    experiment: Experiment,
    phase: Phase,
    path: Path,
    layers: ShallowLayers | None = None,
    chip_profile: ChipProfile | None = None,
) -> tuple[list[Collective], TimedStep]:
    """The collectives of one program's HLO text (one chunk) with their times, and its time.

    With `layers`, the times are from the shallow program in the folder `unrolled` next to the text.
    """
    dispatch, notes = experiment.dispatch(phase), list[str]()
    is_manual = experiment.program.partitioner is Partitioner.MANUAL
    is_balanced = experiment.workload.routing_skew == 1
    if is_manual and is_balanced and dispatch is not None and dispatch.has_rounds:
        notes.append(dispatch.rounds_note)
    notes += _precision(experiment)
    if layers is None:
        is_tpu = experiment.topology.chip.kind is ChipKind.TPU
        if is_tpu and experiment.is_scanned and phase is Phase.DECODE:
            loop = "auto" if experiment.plan.pp == 1 else "unroll"
            notes.append(
                "scanned layers cannot prefetch the weights of the next layer, so a step may take twice "
                f"as long as with --loop {loop}"
            )
        return read_timed(experiment, phase, path, chip_profile=chip_profile, notes=notes)
    folds, n_layers = fold_words(layers), experiment.model.n_layers
    of = (
        f"{len(layers.layers)} of the {n_layers} layers: {folds}"
        if folds
        else f"all {n_layers} layers"
    )
    timed_rows, step = read_timed(
        experiment.unrolled(layers),
        phase,
        path.parent / UNROLLED / path.name,
        layers=layers,
        chip_profile=chip_profile,
        notes=[*notes, f"time from an unrolled program of {of}"],
    )
    rows = program_collectives(experiment, phase, read_hlo(path))
    deep, names = deep_rows(rows, timed_rows, step.simulated, layers)
    step, n_untimed = replace(step, row_names=names), sum(row.dur_s is None for row in deep)
    if not n_untimed:
        return deep, step
    scanned, _ = read_timed(experiment, phase, path, chip_profile=chip_profile)
    rows = [
        row if row.dur_s is not None else replace(by_scan, start_s=None)
        for row, by_scan in zip(deep, scanned, strict=True)
    ]
    note = (
        f"{n_untimed} of {len(rows)} collectives of the scanned layers have no counterpart in "
        "unrolled layers; their rows have the times of scanned layers"
    )
    return rows, replace(step, time=replace(step.time, notes=(*step.time.notes, note)))


def fold_words(layers: ShallowLayers) -> str:
    """Which layers of a program represent others; empty if none does."""
    return " and ".join(
        f"layers {fold.first} to {fold.behind - 1} repeat {fold.times} times"
        if fold.n_layers > 1
        else f"layer {fold.first} repeats {fold.times} times"
        for fold in layers.folds
    )


def read_timed(
    experiment: Experiment, phase: Phase, path: Path, **details: Any
) -> tuple[list[Collective], TimedStep]:
    """The collectives of one program with their times, and the time of its step; `details` are for `timed_step`."""
    collectives = module_collectives(
        read_hlo(path), mesh=experiment.mesh, crosses_slices=experiment.topology.crosses_slices
    )
    return _timed(experiment, phase, collectives, **details)


def _timed(
    experiment: Experiment, phase: Phase, collectives: ModuleCollectives, **details: Any
) -> tuple[list[Collective], TimedStep]:
    known: dict[str, Any] = {
        "experts": expert_load(experiment, phase),
        "lengths": (experiment.sequence_lengths(phase),),
    }
    module, topology = collectives.flow.module, experiment.topology
    step = timed_step(module, collectives, phase=phase, topology=topology, **{**known, **details})
    rows = collectives.rows(n_steps_of=n_steps_of(experiment), default_phase=phase)
    return step.rows(rows), step


def placed_rows(rows: Iterable[Collective], start_s: float) -> Iterator[Collective]:
    """The rows of a program that starts at this time."""
    for row in rows:
        yield row if row.start_s is None else replace(row, start_s=row.start_s + start_s)


def _precision(experiment: Experiment) -> Iterator[str]:
    workload = experiment.workload
    yield from precision_notes(
        workload.weight_dtype, workload.activation_dtype, experiment.topology.chip
    )


def _read_engine(
    experiment: Experiment,
    phase: Phase,
    hlo_dir: Path,
    layers: ShallowLayers | None,
    chip_profile: ChipProfile | None,
) -> ReadPrograms:
    """A phase of a serving engine, whose step is several programs, one after the other.

    All chunks of prefill run the same programs; kernels that read the cache take longer in later ones.
    """
    chunks, n_chunks = experiment.prefill_chunks, experiment.n_chunks(phase)
    report = json.loads((hlo_dir / f"{phase}.json").read_text(encoding="utf-8"))
    mesh = replace(experiment.plan.mesh, order=tuple(report["order"]))
    tables: list[ModuleCollectives] = []
    for name in report.get("programs", STEP_PROGRAMS):  # reports up to version 0.1 lack it
        module = read_hlo(hlo_dir / program_file(phase, name))
        if frontend_of(experiment).implies_scopes:
            module = with_scopes(module)
        crosses = experiment.topology.crosses_slices
        tables.append(module_collectives(module, mesh=mesh, crosses_slices=crosses))
    last = experiment.sequence_lengths(phase)
    first = replace(last, n_keys=float(last.n_queries))
    is_cut = phase is Phase.PREFILL and chunks.n_position_chunks > 1
    times, rows, steps = list[StepTime](), list[Collective](), list[TimedStep]()
    for lengths in (first, last) if is_cut else (last,):
        notes = tuple(_precision(experiment))  # of the first program
        rows, steps, start_s = [], [], 0.0
        for table in tables:
            details = {"lengths": (lengths,), "notes": notes, "chip_profile": chip_profile}
            folded = layers if table is tables[0] else None  # the program of the model
            timed, step = _timed(experiment, phase, table, layers=folded, **details)
            rows += placed_rows(timed, start_s)
            steps.append(replace(step, start_s=start_s))
            start_s, notes = start_s + step.time.step.value_s, ()
        times.append(summed_time([step.time for step in steps]))
    return ReadPrograms(
        rows=[replace(row, count=row.count * n_chunks) for row in rows],
        times=(times[0] if n_chunks == 1 else prefill_time(times, chunks),),
        steps=tuple(steps),
    )
