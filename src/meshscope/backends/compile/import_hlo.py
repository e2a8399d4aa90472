"""Reads HLO text dumped by other tools: its collectives and, for whole TPU modules, step times."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshscope.backends.compile.whole_depth import depth_note, rows_of_all_layers, whole_depth
from meshscope.cost.chunk_times import summed_time
from meshscope.cost.sequence_lengths import SequenceLengths
from meshscope.cost.shallow_rows import deep_rows
from meshscope.cost.steps import TimedStep, timed_step
from meshscope.errors import ParseError, SpecError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.interconnect.profile import ChipProfile
from meshscope.readers.hlo.collectives import ModuleCollectives, module_collectives, rows_of
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.scope_rules import EngineRules
from meshscope.readers.hlo.scopes import with_scopes
from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.model.shallow import ShallowLayers
from meshscope.spec.plan.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedProgram:
    """A module; `phase` is the step that the user says it belongs to, `default_phase` if no scope names one."""

    module: HloModule
    phase: Phase | None = None
    default_phase: Phase | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPrograms:
    """The collectives of imported programs, their schedules, and the step times that could be estimated."""

    rows: list[Collective]
    steps: tuple[TimedStep, ...]
    times: tuple[StepTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A program with its collectives and their rows."""

    program: ImportedProgram
    collectives: ModuleCollectives
    rows: list[Collective]
    layers: ShallowLayers | None  # if the user states how many layers the model has

    @property
    def all_rows(self) -> list[Collective]:
        """The rows of all layers of the model."""
        return self.rows if self.layers is None else rows_of_all_layers(self.rows, self.layers)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the time assumes of layers that the program lacks."""
        note = None if self.layers is None else depth_note(self.layers)
        return () if note is None else (note,)

    @property
    def phases(self) -> set[Phase | None]:
        """The phases of the rows; the one that the user names for a program without rows."""
        named = self.program.phase or self.program.default_phase
        return {row.phase for row in self.rows} or {named}


def read_imported(  # noqa: PLR0913  programs, what they ran on, and how to read them
    programs: Sequence[ImportedProgram],
    *,
    topology: Topology,
    mesh: Mesh,
    rules: Sequence[EngineRules] = (),
    n_layers: int | None = None,
    lengths: Mapping[Phase | None, Sequence[SequenceLengths]] = MappingProxyType({}),
    chip_profile: ChipProfile | None = None,
) -> ImportedPrograms:
    """The rows and step times of the programs; ParseError for a program of another mesh.

    A dump does not show the number of steps in a request, so each phase counts as one step. A step
    gets a time if a single whole TPU module contains it and no other phase, or if the user says which
    modules it runs one after the other. `n_layers` are those of the model, if a program has only a few of
    them, and `lengths` the sequences of a step on one device, by phase or for all of them.
    """
    reads = [_read(program, topology, mesh, rules, n_layers) for program in programs]
    if n_layers is not None and all(read.layers is None for read in reads):
        raise SpecError(
            f"no program names layers that stand for the {n_layers} of the model. Leave --layers and "
            "--model out."
        )
    rows: list[Collective] = []
    steps: list[TimedStep] = []
    in_step = _in_steps(reads, topology)
    for read in reads:
        phase = in_step.get(id(read))
        if phase is None:
            rows += read.all_rows
            continue
        step = timed_step(
            read.program.module,
            read.collectives,
            phase=phase,
            topology=topology,
            chip_profile=chip_profile,
            layers=read.layers,
            lengths=lengths.get(phase, lengths.get(None, ())),
            notes=read.notes,
        )
        start_s = sum(s.time.step.value_s for s in steps if s.time.phase is phase)
        rows += _later(_timed(read, step), start_s)
        steps.append(replace(step, start_s=start_s))
    times = (
        summed_time([s.time for s in steps if s.time.phase is phase])
        for phase in dict.fromkeys(step.time.phase for step in steps)
    )
    return ImportedPrograms(rows=rows, steps=tuple(steps), times=tuple(times))


def _timed(read: _Read, step: TimedStep) -> list[Collective]:
    """The rows of all layers of the model with their times."""
    rows = step.rows(read.rows)
    if read.layers is None:
        return rows
    return deep_rows(rows_of_all_layers(rows, read.layers), rows, step, read.layers).rows


def _later(rows: Sequence[Collective], start_s: float) -> Iterator[Collective]:
    """The rows of a program that starts at `start_s` of the step."""
    for row in rows:
        yield row if row.start_s is None else replace(row, start_s=row.start_s + start_s)


def _read(
    program: ImportedProgram,
    topology: Topology,
    mesh: Mesh,
    rules: Sequence[EngineRules],
    n_layers: int | None,
) -> _Read:
    module = with_scopes(program.module, rules)
    collectives = module_collectives(module, mesh=mesh, crosses_slices=topology.crosses_slices)
    rows = rows_of(
        collectives,
        n_steps_of=dict.fromkeys(Phase, 1),
        crosses_slices=topology.crosses_slices,
        default_phase=program.phase or program.default_phase,
    )
    _check_phase(program, rows)
    _check_mesh(module, rows, mesh)
    return _Read(
        program=replace(program, module=module),
        collectives=collectives,
        rows=rows,
        layers=None if n_layers is None else whole_depth(module, rows, n_layers),
    )


def _check_phase(program: ImportedProgram, rows: Sequence[Collective]) -> None:
    """ParseError if scopes name another phase than the user."""
    others = sorted({row.phase for row in rows if row.phase is not None} - {program.phase})
    if program.phase is not None and others:
        raise ParseError(
            f"{program.module.origin}:1: is given as {program.phase}, but its scopes name "
            f"{' and '.join(others)}. Give the file without '{program.phase}='."
        )


def _check_mesh(module: HloModule, rows: Sequence[Collective], mesh: Mesh) -> None:
    """ParseError if devices communicate, but never along an axis of the mesh."""
    grouped = [row for row in rows if row.groups and len(row.groups[0]) > 1]
    if not grouped or any(row.axis is not None for row in grouped):
        return
    sizes = sorted({len(row.groups[0]) for row in grouped})
    axes = ",".join(f"{name}={size}" for name, size in mesh.axes)
    raise ParseError(
        f"{module.origin}:1: its collectives have groups of {' and '.join(map(str, sizes))} devices, "
        f"such as {grouped[0].groups[0]}, and none of them follows an axis of the mesh ({axes}). "
        "Give the mesh for which it was compiled, with --mesh NAME=SIZE,... and --device-order."
    )


def _in_steps(reads: Sequence[_Read], topology: Topology) -> Mapping[int, Phase]:
    """The phase of each program that is part of a step with a time, by id."""
    phases: dict[int, Phase] = {}
    for phase in Phase:
        members = [read for read in reads if phase in read.phases]
        is_stated = all(read.program.phase is not None for read in members)
        is_alone = len(members) == 1 or is_stated
        if is_alone and all(
            read.phases == {phase} and _has_time(read, topology) for read in members
        ):
            phases |= {id(read): phase for read in members}
    return phases


def _has_time(read: _Read, topology: Topology) -> bool:
    module = read.program.module
    is_whole = module.cut_off_at is None
    return is_whole and module.is_scheduled and topology.chip.kind is ChipKind.TPU
