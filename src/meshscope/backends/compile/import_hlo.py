"""Reads HLO text dumped by other tools: its collectives and, for whole TPU modules, step times.

A program of a few layers gives the rows and the schedule of the whole model: its last identical layers represent
the missing ones.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from meshscope.backends.compile.function import WORK, compiling
from meshscope.backends.compile.read import ReadPrograms, fold_words, placed_rows
from meshscope.cost.row_times import deep_rows
from meshscope.cost.steps import TimedStep, summed_time, timed_step
from meshscope.errors import ParseError, SpecError
from meshscope.events.collective import Collective, OtherOperation
from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology
from meshscope.model.layers import FOLDED_LAYERS, MAX_PERIOD, Fold, ShallowLayers
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.mesh import Mesh
from meshscope.plans.workload import parse_lengths
from meshscope.programs.environments import check_tpu_compiler
from meshscope.readers.hlo.attribution import OUTSIDE_LAYERS, scope_of
from meshscope.readers.hlo.collectives import ModuleCollectives, module_collectives
from meshscope.readers.hlo.communication import other_operations
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.scopes import with_scopes
from meshscope.store.folder import scratch_folder
from meshscope.workers import run_worker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Program:
    """A program with its collectives, and the phases of its rows, or the one that the user names if it has none."""

    is_stated: bool  # whether the user names the step that runs it
    collectives: ModuleCollectives
    rows: list[Collective]
    layers: ShallowLayers | None  # if the user states how many layers the model has
    phases: set[Phase | None]


def read_imported(
    experiment: ExperimentRecord,
    modules: Mapping[str, HloModule],
) -> ReadPrograms:
    """The rows and step times of the programs of an imported run, by their names, in the order of a step.

    A dump does not show the number of steps in a request, so each phase counts as one step. A step
    gets a time if a single whole TPU module contains it and no other phase, or if the user says which
    modules it runs one after the other. ParseError for a program of another mesh.
    """
    topology, n_layers = experiment.topology, experiment.extended_layers
    assert topology is not None
    lengths = {} if experiment.lengths is None else parse_lengths(experiment.lengths)
    programs = [
        _read(experiment, topology, name, with_scopes(module)) for name, module in modules.items()
    ]
    if n_layers is not None and all(program.layers is None for program in programs):
        raise SpecError(
            f"no program names layers that stand for the {n_layers} of the model. Leave --layers and "
            "--model out."
        )
    rows: list[Collective] = []
    steps: list[TimedStep] = []
    in_step = _in_steps(programs, topology)
    for program in programs:
        phase, layers, notes = in_step.get(program), program.layers, ()
        if phase is None:
            rows += program.rows if layers is None else rows_of_all_layers(program.rows, layers)
            continue
        if layers is not None and layers.folds:  # what the time assumes of layers that it lacks
            n, words = len(layers.layers), fold_words(layers)
            notes = (f"time of {_n_layers(layers)} layers from a program of {n}: {words}",)
        step = timed_step(
            program.collectives.flow.module,
            program.collectives,
            phase=phase,
            topology=topology,
            layers=layers,
            lengths=lengths.get(phase, lengths.get(None, ())),
            notes=notes,
        )
        timed = step.rows(program.rows)
        if layers is not None:
            deep = rows_of_all_layers(timed, layers)
            timed, _ = deep_rows(deep, timed, step.simulated, layers)
        start_s = sum(s.time.step.value_s for s in steps if s.time.phase is phase)
        rows += placed_rows(timed, start_s)
        steps.append(replace(step, start_s=start_s))
    of_phases = (
        summed_time([s.time for s in steps if s.time.phase is phase])
        for phase in dict.fromkeys(step.time.phase for step in steps)
    )
    times = (time for time in of_phases if time.step.value_s)  # 0 if nothing in it has a time
    others: list[OtherOperation] = []
    for program in programs:
        phase, *more = program.phases
        others += other_operations(program.collectives.flow.module, None if more else phase)
    return ReadPrograms(rows=rows, others=tuple(others), steps=tuple(steps), times=tuple(times))


def _read(
    experiment: ExperimentRecord, topology: Topology, name: str, module: HloModule
) -> _Program:
    mesh, n_layers = experiment.device_mesh, experiment.extended_layers
    stated = (experiment.program_phases or {}).get(name)
    named = stated or experiment.phase
    collectives = module_collectives(module, mesh=mesh, crosses_slices=topology.crosses_slices)
    rows = collectives.rows(default_phase=named)
    others = sorted({row.phase for row in rows if row.phase is not None} - {stated})
    if stated is not None and others:
        raise ParseError(
            f"{module.origin}:1: is given as {stated}, but its scopes name "
            f"{' and '.join(others)}. Give the file without '{stated}='."
        )
    _check_mesh(module, rows, mesh)
    return _Program(
        is_stated=stated is not None,
        collectives=collectives,
        rows=rows,
        layers=None if n_layers is None else _whole_depth(module, rows, n_layers),
        phases={row.phase for row in rows} or {named},
    )


def _check_mesh(module: HloModule, rows: Sequence[Collective], mesh: Mesh) -> None:
    """ParseError if devices communicate, but never along an axis of the mesh."""
    grouped = [row for row in rows if row.groups and row.group_size != 1]
    if not grouped or any(row.axis is not None for row in grouped):
        return
    sizes = sorted({len(row.groups[0]) for row in grouped})
    axes = ",".join(f"{name}={size}" for name, size in mesh.axes)
    raise ParseError(
        f"{module.origin}:1: its collectives have groups of {' and '.join(map(str, sizes))} devices, "
        f"such as {grouped[0].groups[0]}, and none of them follows an axis of the mesh ({axes}). "
        "Give the mesh for which it was compiled, with --mesh NAME=SIZE,... and --device-order."
    )


def _in_steps(programs: Sequence[_Program], topology: Topology) -> Mapping[_Program, Phase]:
    """The phase of each program that is part of a step with a time."""
    in_step: dict[_Program, Phase] = {}
    for phase in Phase if topology.chip.kind is ChipKind.TPU else ():
        members = [program for program in programs if phase in program.phases]
        modules = [program.collectives.flow.module for program in members]
        is_alone = len(members) == 1 or all(program.is_stated for program in members)
        is_timed = all(module.is_scheduled for module in modules)
        if is_alone and is_timed and all(program.phases == {phase} for program in members):
            in_step |= dict.fromkeys(members, phase)
    return in_step


def _whole_depth(
    module: HloModule, rows: Sequence[Collective], n_layers: int
) -> ShallowLayers | None:
    """The layers of the program, some repeated until there are `n_layers`; None if it has no layers.

    SpecError if the program has more layers, or none that show how they repeat.
    """
    if n_looped := _check_loops(module, n_layers):
        return ShallowLayers(layers=tuple(range(n_looped)), folds=())
    kinds = _layer_kinds(module, rows)
    if not kinds:
        return None
    n_missing = n_layers - len(kinds)
    if n_missing < 0:
        raise SpecError(
            f"--layers {n_layers}: the program has {len(kinds)} layers. Give the number of all layers of "
            "the model, or leave the option out."
        )
    indices = tuple(range(len(kinds)))
    if not n_missing:
        return ShallowLayers(layers=indices, folds=())
    for period in range(1, MAX_PERIOD + 1):
        bodies = (kinds[end - period : end] for end in range(len(kinds), period - 1, -period))
        times = sum(1 for _ in takewhile(lambda body, last=kinds[-period:]: body == last, bodies))
        if times > 1 and n_missing % period == 0:
            fold = _fold(len(kinds), period, times, n_missing)
            return ShallowLayers(layers=indices, folds=(fold,))
    raise SpecError(
        f"--layers {n_layers}: the last of the program's {len(kinds)} layers are not alike, so the time of "
        "a layer is unknown. Compile at least two layers of each kind at its end."
    )


def _check_loops(module: HloModule, n_layers: int) -> int:
    """Layers up to the last one in a loop, 0 without loops; SpecError if the model has more."""
    loops = [
        (scope.layers[-1] + 1, instruction)
        for instruction in module.entry.instructions
        if (scope := scope_of(instruction.op_name)).layers is not None and len(scope.layers) > 1
    ]
    if not loops:
        return 0
    n_looped, loop = max(loops, key=lambda pair: pair[0])
    if n_looped != n_layers:
        raise SpecError(
            f"{module.where(loop)}: '{loop.name}' runs layers up to {n_looped - 1} in a loop, so the program "
            f"does not stand for {n_layers} layers. Leave --layers and --model out."
        )
    return n_looped


def _layer_kinds(module: HloModule, rows: Sequence[Collective]) -> list[Hashable]:
    """What each layer of the entry computation consists of: parts, kernels and collectives."""
    kinds: dict[int, Counter[Hashable]] = {}
    for instruction in module.entry.instructions:
        scope = scope_of(instruction.op_name)
        if scope.layers is None or scope.part in OUTSIDE_LAYERS:
            continue
        kind = kinds.setdefault(scope.layers[0], Counter())
        if scope.part is not None:
            kind[scope.part] = 1
        if instruction.custom_call_target == "tpu_custom_call":
            kind[instruction.name.rstrip("0123456789.")] += 1
    for row in rows:
        if row.layer is not None:
            kinds.setdefault(row.layer, Counter())[row.part, row.kind, row.shape] += 1
    return [
        frozenset(kinds.get(layer, Counter()).items())
        for layer in range(max(kinds, default=-1) + 1)
    ]


def _fold(n_layers: int, period: int, times: int, n_missing: int) -> Fold:
    """The middle ones of the identical layers; the first and the last are scheduled differently."""
    n_around = min(2, (times - 1) // 2)
    n_most = min(max(1, FOLDED_LAYERS // period), times - n_around - max(1, n_around))
    n_bodies = next(n for n in range(n_most, 0, -1) if n_missing // period % n == 0)
    return Fold(
        first=n_layers - (times - n_around) * period,
        n_layers=n_bodies * period,
        times=1 + n_missing // (n_bodies * period),
    )


def rows_of_all_layers(rows: Sequence[Collective], layers: ShallowLayers) -> list[Collective]:
    """The rows of every layer of the model; a missing layer has the rows of its substitute."""
    inside = [row for row in rows if row.layer is not None]
    first = rows.index(inside[0]) if inside else len(rows)
    before = [row for row in rows[:first] if row.layer is None]
    behind = [row for row in rows[first:] if row.layer is None]
    repeated = [
        replace(row, layer=layer)
        for layer in range(_n_layers(layers))
        for row in inside
        if row.layer == layers.place_of(layer)[0]
    ]
    return [*before, *repeated, *behind]


def _n_layers(layers: ShallowLayers) -> int:
    return len(layers.layers) + sum(f.n_layers * (f.times - 1) for f in layers.folds)


def compile_graph(program: Path, topology: Topology, text: Path) -> Mapping[str, str]:
    """Compiles StableHLO for a slice, writes its HLO text, and returns the compiler versions."""
    topology.check_tpu("StableHLO compiles only for TPUs")
    check_tpu_compiler("compiling StableHLO")
    task = compiling(f"{program}: the TPU compiler", "the program", topology)
    names = {"program": str(program), "topology": topology.name, "text": str(text)}
    with scratch_folder() as scratch:
        return run_worker(WORK, {**names, "options": {}}, scratch, task)["versions"]
