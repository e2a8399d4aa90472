"""Collectives of the programs in a trace: as compiled, and as recorded.

A profile of XLA holds the HLO of its programs, so each recorded collective has a compiled row with
its layer, part, shape and groups. A measured row is that row with the recorded count and times.
`count` is the executions in one run of the program on one device, `n_steps` the runs in the trace.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import polars as pl

from meshscope.errors import ParseError
from meshscope.events.collective import SUBSETS, Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import ProgramFacts
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.executions import call_sites
from meshscope.readers.hlo.groups import CrossesSlices
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.hlo.scopes import with_scopes
from meshscope.readers.traces.annotations import phase_of
from meshscope.readers.traces.groups import NO_PLAN

S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRows:
    """Compiled and measured rows; `ops` are the rows of the trace's ops that they cover.

    `places` has the layer, part and shape of each instruction, by the name of its op.
    """

    rows: tuple[Collective, ...]
    programs: tuple[ProgramFacts, ...]
    ops: frozenset[int]
    places: Mapping[str, Mapping[str, Any]]
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """Executions of the instructions of one program, by device, and their mean times in s."""

    ops: Mapping[str, list[int]]
    counts: Mapping[str, Mapping[int, int]]
    times: Mapping[str, tuple[float, float, float]]  # start, duration, exposed
    phase: Phase | None


def program_rows(
    programs: Mapping[str, str],
    collectives: pl.DataFrame,
    *,
    mesh: Mesh | None,
    crosses_slices: CrossesSlices,
) -> ProgramRows:
    """The rows of all programs; `programs` are HLO texts by name.

    `collectives` has a row per recorded execution: name (`program/instruction`), op, device, phase,
    start_ns, dur_ns and exposed_ns.
    """
    rows: list[Collective] = []
    ops: set[int] = set()
    places: dict[str, Mapping[str, Any]] = {}
    facts: list[ProgramFacts] = []
    findings: list[str] = []
    for program, text in programs.items():
        recorded = _recorded(collectives, program)
        if not recorded.counts:
            continue
        try:
            module = with_scopes(parse_hlo(text, program), ())
            compiled = _compiled(module, mesh, crosses_slices, recorded.phase)
        except ParseError as error:
            findings.append(f"{error} Its collectives are read from the names of its events.")
            continue
        of_program, of_facts = _of_program(module, compiled, recorded)
        rows += of_program
        facts.append(of_facts)
        places |= {
            f"{program}/{name}": place for name, place in _places(module, of_program).items()
        }
        named = {row.hlo_name for row in of_program if row.source is Source.MEASURED}
        ops |= {op for name, same in recorded.ops.items() if name in named for op in same}
    return ProgramRows(
        rows=tuple(rows),
        programs=tuple(facts),
        ops=frozenset(ops),
        places=places,
        findings=tuple(findings),
    )


def _places(module: HloModule, rows: Sequence[Collective]) -> dict[str, Mapping[str, Any]]:
    """The layer, part and shape of the instructions; the layer of those in one layer."""
    places: dict[str, Mapping[str, Any]] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            scope = scope_of(instruction.op_name)
            layers = scope.layers or ()
            layer = layers[0] if len(layers) == 1 else None
            if layer is not None or scope.part is not None:
                places[instruction.name] = {"layer": layer, "part": scope.part}
    for name, same in _by_name(rows).items():
        of_name = {
            fact: {getattr(row, fact) for row in same} for fact in ("layer", "part", "shape")
        }
        places[name] = {fact: v.pop() if len(v) == 1 else None for fact, v in of_name.items()}
    return places


def _by_name(rows: Sequence[Collective]) -> Mapping[str, list[Collective]]:
    named: dict[str, list[Collective]] = defaultdict(list)
    for row in rows:
        if row.hlo_name is not None and row.source is Source.MEASURED:
            named[row.hlo_name].append(row)
    return named


def _recorded(collectives: pl.DataFrame, program: str) -> _Recorded:
    prefix = f"{program}/"
    of_program = collectives.filter(pl.col("name").str.starts_with(prefix)).with_columns(
        pl.col("name").str.strip_prefix(prefix)
    )
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for name, device, n in of_program.group_by("name", "device").len().iter_rows():
        counts[name][device] = n
    times = of_program.group_by("name").agg(
        pl.col("start_ns").min(), pl.col("dur_ns").mean(), pl.col("exposed_ns").mean()
    )
    phases = of_program["phase"].unique().to_list()
    return _Recorded(
        ops=dict(of_program.group_by("name").agg(pl.col("op").unique()).iter_rows()),
        counts=counts,
        times={name: (a * S, b * S, c * S) for name, a, b, c in times.iter_rows()},
        phase=Phase(phases[0]) if len(phases) == 1 and phases[0] is not None else None,
    )


def _compiled(
    module: HloModule, mesh: Mesh | None, crosses_slices: CrossesSlices, phase: Phase | None
) -> list[Collective]:
    """The rows of one run of the program; without a plan their axis is unknown."""
    named = phase_of(module.name)
    rows = collectives_of(
        module,
        mesh=mesh or Mesh(axes=(("device", module.n_devices),)),
        n_steps_of={},
        crosses_slices=crosses_slices,
        default_phase=phase or (None if named is None else Phase(named)),
    )
    if mesh is not None:
        return rows
    return [replace(row, axis=None, axis_reason=_without_plan(row.axis_reason)) for row in rows]


def _without_plan(reason: str | None) -> str:
    of_mesh = (" match no axis of the mesh", f" {SUBSETS} ")
    others = [
        r for r in (reason or "").split("; ") if r and not any(words in r for words in of_mesh)
    ]
    return "; ".join([NO_PLAN, *others])


def _of_program(
    module: HloModule, compiled: Sequence[Collective], recorded: _Recorded
) -> tuple[list[Collective], ProgramFacts]:
    expected = _expected(module, compiled)
    n_runs = max(
        (
            -(-n // expected[name])
            for name, by_device in recorded.counts.items()
            for n in by_device.values()
            if expected[name]
        ),
        default=1,
    )
    rows = [replace(row, n_steps=n_runs) for row in compiled]
    measured = (
        _measured(row, share, expected[row.hlo_name or ""], recorded, n_runs)
        for row, share in zip(rows, _shares(compiled), strict=True)
    )
    executed = {name: recorded.counts.get(name, {}) for name in expected}
    facts = ProgramFacts(
        name=module.origin,
        n_runs=n_runs,
        n_collectives=len(expected),
        n_as_compiled=sum(
            bool(by_device) and all(n == expected[name] * n_runs for n in by_device.values())
            for name, by_device in executed.items()
        ),
        n_missing=sum(not by_device for by_device in executed.values()),
    )
    return [*rows, *(row for row in measured if row is not None)], facts


def _expected(module: HloModule, rows: Sequence[Collective]) -> Counter[str]:
    """Executions of each collective instruction in one run of the program on one device."""
    names = {row.hlo_name for row in rows}
    counts: Counter[str] = Counter()
    for site in call_sites(module, lambda instruction: instruction.name in names):
        counts[site.instruction.name] += site.count
    return counts


def _shares(rows: Sequence[Collective]) -> list[float]:
    """The share of each row in the bytes of its instruction, which may combine several arrays."""
    sizes: dict[tuple[str | None, int | None], list[int | None]] = defaultdict(list)
    for row in rows:
        sizes[row.hlo_name, row.layer].append(row.payload_bytes)
    shares: list[float] = []
    for row in rows:
        same = sizes[row.hlo_name, row.layer]
        known = [size for size in same if size is not None]
        is_sized = len(known) == len(same) and sum(known) > 0 and row.payload_bytes is not None
        shares.append((row.payload_bytes or 0) / sum(known) if is_sized else 1 / len(same))
    return shares


def _measured(
    row: Collective, share: float, n_expected: int, recorded: _Recorded, n_runs: int
) -> Collective | None:
    """The row as recorded; None if no device of its groups recorded it."""
    by_device = recorded.counts.get(row.hlo_name or "", {})
    members = {device for group in row.groups for device in group}
    counted = [n for device, n in by_device.items() if not members or device in members]
    if not counted or not n_expected:
        return None
    total = Fraction(row.count * sum(counted), n_expected * len(counted))
    is_alike = (total / n_runs).denominator == 1  # else all runs together count as one step
    start_s, dur_s, exposed_s = recorded.times[row.hlo_name or ""]
    return replace(
        row,
        source=Source.MEASURED,
        count=round(total / n_runs) if is_alike else max(1, round(total)),
        n_steps=n_runs if is_alike else 1,
        start_s=start_s,
        dur_s=dur_s * share,
        exposed_s=exposed_s * share,
        time_basis=Source.MEASURED.value,
    )
