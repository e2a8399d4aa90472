"""A profile joined with the HLO of the programs that ran: rows of the table, load, waiting, findings.

A measured row is a compiled one with the count that the profile shows: how often the instruction
executed in one step on one device, as a share of how often the program says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import polars as pl

from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.events.measured import CollectiveTime, DeviceLoad
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.executions import call_sites
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.profile.joining import join_hlo, with_hlo
from meshscope.readers.profile.ops import Ops
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.session import Profile
from meshscope.readers.profile.steps import ops_in_steps
from meshscope.readers.profile.waiting import loads, participants

Facts = dict[tuple[str, str], dict[str, Any]]

# Opcodes that name values and execute nothing.
_NOT_EXECUTED = frozenset({"parameter", "get-tuple-element", "tuple", "constant", "bitcast"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRows:
    """What a profile holds: measured `rows`, figures, and `ops`, a row for each executed op."""

    rows: list[Collective]
    loads: tuple[DeviceLoad, ...]
    times: tuple[CollectiveTime, ...]
    findings: tuple[str, ...]
    ops: pl.DataFrame


def measured_of(
    profile: Profile,
    modules: Mapping[Phase, HloModule],
    compiled: Sequence[Collective],
    *,
    n_steps: Mapping[Phase, int],
) -> ProfileRows:
    """What the profile of these modules holds; `n_steps` of each phase ran while it was recorded."""
    names = {phase: module.name for phase, module in modules.items()}
    ops = _of_modules(ops_in_steps(profile), set(names.values()))
    facts = _facts(modules, compiled)
    expected = _expected(modules, compiled)
    rows = join_hlo(ops, facts)
    staged = _staged(names, compiled)
    faults = capture_faults(
        profile,
        with_hlo(ops, facts),
        expected={key: n for key, n in expected.items() if key not in staged},
        expected_by_device=staged,
    )
    steps = {phase: n_steps[phase] for phase in modules}
    return ProfileRows(
        rows=_measured_rows(rows, compiled, expected, modules, steps),
        loads=tuple(_loads(rows, steps)),
        times=tuple(_times(rows)),
        findings=tuple(fault.message for fault in faults),
        ops=rows,
    )


def _of_modules(ops: Ops, names: set[str]) -> Ops:
    """The ops of these modules; what runs between steps, such as making a cache, is left out."""
    known = ops.instructions.filter(pl.col("module").is_in(list(names)))["op"]
    if known.is_empty():
        return ops
    events = ops.events.filter(pl.col("op").is_in(known.implode()))
    return Ops(
        events=events, instructions=ops.instructions.filter(pl.col("op").is_in(known.implode()))
    )


def _facts(modules: Mapping[Phase, HloModule], compiled: Sequence[Collective]) -> Facts:
    """What the programs tell of each instruction, by (module, name)."""
    facts: Facts = {}
    for phase, module in modules.items():
        for computation in module.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode in _NOT_EXECUTED:
                    continue
                scope = scope_of(instruction.op_name)
                facts[module.name, instruction.name] = {
                    "phase": phase.value,
                    "opcode": instruction.opcode,
                    "part": scope.part,
                    "layers": list(scope.layers or ()),
                    "source_line": module.source_line(instruction),
                }
        for name, rows in _by_name(r for r in compiled if r.phase is phase).items():
            facts[module.name, name] = _collective_facts(rows)
    return facts


def _by_name(rows: Iterable[Collective]) -> dict[str, list[Collective]]:
    found: dict[str, list[Collective]] = {}
    for row in rows:
        if row.hlo_name is not None:
            found.setdefault(row.hlo_name, []).append(row)
    return found


def _collective_facts(rows: Sequence[Collective]) -> dict[str, Any]:
    """Facts of one instruction; where it carries several arrays, their bytes together."""
    first = rows[0]
    of_first_layer = [row for row in rows if row.layer == first.layer]
    is_one = len(of_first_layer) == 1
    sizes = [row.payload_bytes for row in of_first_layer]
    wires = [row.wire_bytes for row in of_first_layer]
    return {
        "phase": first.phase,
        "part": _shared(row.part for row in of_first_layer),
        "kind": first.kind.value,
        "opcode": first.opcode,
        "axis": first.axis,
        "axis_reason": first.axis_reason,
        "group_size": first.group_size,
        "n_groups": first.n_groups,
        "groups": [list(group) for group in first.groups],
        "dtype": first.dtype,
        "shape": list(first.shape) if is_one and first.shape is not None else None,
        "payload_bytes": None if None in sizes else sum(s for s in sizes if s is not None),
        "wire_bytes": None if None in wires else float(sum(w for w in wires if w is not None)),
        "stage": first.stage,
        "algorithm": first.algorithm,
        "inserted_by": first.inserted_by,
        "crosses_slices": first.crosses_slices,
        "hlo_shape": first.hlo_shape,
        "source_line": first.source_line,
        "layers": [layer for layer in dict.fromkeys(r.layer for r in rows) if layer is not None],
    }


def _shared(values: Iterable[Part | None]) -> Part | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _expected(
    modules: Mapping[Phase, HloModule], compiled: Sequence[Collective]
) -> dict[tuple[str, str], int]:
    """How often each collective instruction executes in one run of its module on one device."""
    found: dict[tuple[str, str], int] = {}
    for phase, module in modules.items():
        names = set(_by_name(row for row in compiled if row.phase is phase))
        for site in call_sites(module, lambda instruction, names=names: instruction.name in names):
            key = module.name, site.instruction.name
            found[key] = found.get(key, 0) + site.count
    return found


def _staged(
    names: Mapping[Phase, str], compiled: Sequence[Collective]
) -> dict[tuple[str, str], dict[int, int]]:
    """How often each device executes an instruction of a branch, in one run of its module."""
    due, found = _due_in_stages(compiled), dict[tuple[str, str], dict[int, int]]()
    for row in compiled:
        if row.phase is None or row.hlo_name is None or not _is_of_branch(row):
            continue
        own = found.setdefault((names[row.phase], row.hlo_name), {})
        n = due[row.phase, row.hlo_name, row.stage]
        own |= {device: n for group in row.groups for device in group}
    return found


def _is_of_branch(row: Collective) -> bool:
    """Whether the devices of its stage alone execute it; a hand-over all do, in every tick."""
    return row.stage is not None and row.part is not Part.STAGE


def _measured_rows(
    rows: pl.DataFrame,
    compiled: Sequence[Collective],
    expected: Mapping[tuple[str, str], int],
    modules: Mapping[Phase, HloModule],
    n_steps: Mapping[Phase, int],
) -> list[Collective]:
    """The compiled rows that were seen, each with its measured count; then what no row explains."""
    seen, staged = _executions_a_device(rows), _due_in_stages(compiled)
    of_branch: dict[tuple[Any, ...], set[int]] = {}
    for row in compiled:
        if _is_of_branch(row):
            of_branch.setdefault((row.phase, row.hlo_name), set()).update(_devices(row))
    found: list[Collective] = []
    for row in compiled:
        if row.phase is None or row.hlo_name is None:
            continue
        module = modules[row.phase]
        key = module.name, row.hlo_name
        devices = _devices(row)
        n_seen = Fraction(sum(seen.get((*key, device), 0) for device in devices))
        if n_unknown := seen.get((*key, None)):  # the backend tells no device: all run it alike
            own = of_branch.get((row.phase, row.hlo_name))
            n_seen += Fraction(n_unknown * len(devices), len(own) if own else module.n_devices)
        due = expected.get(key, 0)
        if row.stage is not None:
            due = min(due, staged[row.phase, row.hlo_name, row.stage])
        n_due = due * len(devices) * n_steps[row.phase]
        count = round(row.count * n_seen / n_due) if n_due else 0
        if count:
            found.append(replace(row, source=Source.MEASURED, count=count))
    return found


def _devices(row: Collective) -> set[int]:
    return {device for group in row.groups for device in group}


def _due_in_stages(compiled: Sequence[Collective]) -> dict[tuple[Any, ...], int]:
    """How often an instruction executes in a step on a device of each stage that shares it."""
    shared: dict[tuple[Any, ...], list[Collective]] = {}
    for row in compiled:
        shared.setdefault((row.phase, row.hlo_name, row.stage), []).append(row)
    due: dict[tuple[Any, ...], int] = {}
    for key, rows in shared.items():
        n_arrays = max(sum(r.layer == row.layer for r in rows) for row in rows)
        due[key] = sum(row.count for row in rows) // n_arrays
    return due


def _executions_a_device(rows: pl.DataFrame) -> dict[tuple[str, str, int | None], int]:
    """How often each collective instruction executed on each device; None where none is told."""
    counted = (
        rows.filter(pl.col("kind").is_not_null()).group_by("module", "hlo_name", "device").len()
    )
    return {(module, name, device): n for module, name, device, n in counted.iter_rows()}


def _loads(rows: pl.DataFrame, n_steps: Mapping[Phase, int]) -> Iterable[DeviceLoad]:
    """What each device did in the steps of each phase; the time between steps is nobody's."""
    for phase in n_steps:
        own = rows.filter(pl.col("phase") == phase.value, pl.col("device").is_not_null())
        steps = [loads(step) for step in own.partition_by("step", maintain_order=True)]
        if not steps:
            continue
        figures = ("busy_s", "collective_s", "wait_s", "idle_s", "window_s")
        summed = (
            pl.concat(steps)
            .group_by("device")
            .agg(
                *(pl.col(name).sum() for name in figures if name != "wait_s"),
                pl.when(pl.col("wait_s").is_not_null().all())
                .then(pl.col("wait_s").sum())
                .first()
                .alias("wait_s"),
            )
        )
        for record in summed.sort("device").iter_rows(named=True):
            yield DeviceLoad(phase=phase, **record)


def _times(rows: pl.DataFrame) -> Iterable[CollectiveTime]:
    """Time on the wire and waiting, for each sort of collective."""
    meetings = participants(rows.filter(pl.col("phase").is_not_null()))
    told = ["phase", "part", "kind", "axis"]
    grouped = meetings.group_by(told, maintain_order=True).agg(
        pl.len().alias("n_executions"), pl.col("dur_s", "wire_s", "wait_s").mean()
    )
    for record in grouped.iter_rows(named=True):
        typed: dict[str, Any] = {
            "phase": Phase(record["phase"]),
            "part": None if record["part"] is None else Part(record["part"]),
            "kind": Kind(record["kind"]),
        }
        yield CollectiveTime(**{**record, **typed})
