"""Collectives of the programs in a trace: as compiled, and as recorded.

A profile of XLA holds the HLO of its programs, so each recorded collective has a compiled row with
its layer, part, shape and groups. A measured row is that row with the recorded count and times.
`count` is the executions in one run of the program on one device, `n_steps` the runs in the trace.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class ProgramRows:
    """Compiled and measured rows; `ops` are the rows of the trace's ops that they cover.

    `places` has the layer, part and shape of each instruction, by the name of its op.
    """

    rows: list[Collective] = field(default_factory=list[Collective])
    programs: list[ProgramFacts] = field(default_factory=list[ProgramFacts])
    ops: set[int] = field(default_factory=set[int])
    places: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    findings: list[str] = field(default_factory=list[str])


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
    found = ProgramRows()
    for program, text in programs.items():
        prefix = f"{program}/"
        recorded = collectives.filter(pl.col("name").str.starts_with(prefix)).with_columns(
            pl.col("name").str.strip_prefix(prefix)
        )
        if recorded.is_empty():
            continue
        try:
            module = with_scopes(parse_hlo(text, program), ())
            compiled = _compiled(module, mesh, crosses_slices, recorded["phase"].unique())
        except ParseError as error:
            found.findings.append(f"{error} Its collectives are read from the names of its events.")
            continue
        measured = _add(found, module, compiled, recorded)
        for name, place in _places(module, measured).items():
            found.places[prefix + name] = place
        names = [row.hlo_name for row in measured]
        found.ops.update(recorded.filter(pl.col("name").is_in(names))["op"])
    return found


def _compiled(
    module: HloModule, mesh: Mesh | None, crosses_slices: CrossesSlices, phases: pl.Series
) -> list[Collective]:
    """The rows of one run of the program in these phases; without a plan their axis is unknown."""
    phase = (phases[0] if len(phases) == 1 else None) or phase_of(module.name)
    rows = collectives_of(
        module,
        mesh=mesh or Mesh(axes=(("device", module.n_devices),)),
        n_steps_of={},
        crosses_slices=crosses_slices,
        default_phase=None if phase is None else Phase(phase),
    )
    if mesh is not None:
        return rows
    unknown: list[Collective] = []
    for row in rows:  # what the reasons say about axes holds for no plan
        reasons = [r for r in (row.axis_reason or "").split("; ") if r]
        others = (r for r in reasons if not any(words in r for words in _OF_MESH))
        unknown.append(replace(row, axis=None, axis_reason="; ".join([NO_PLAN, *others])))
    return unknown


_OF_MESH = (" match no axis of the mesh", f" {SUBSETS} ")


def _add(
    found: ProgramRows, module: HloModule, compiled: Sequence[Collective], recorded: pl.DataFrame
) -> list[Collective]:
    """Adds the rows and facts of one program; its measured rows."""
    expected: Counter[str] = Counter()  # executions of each instruction in one run on one device
    names = {row.hlo_name for row in compiled}
    for site in call_sites(module, lambda instruction: instruction.name in names):
        expected[site.instruction.name] += site.count
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for name, device, n in recorded.group_by("name", "device").len().iter_rows():
        counts[name][device] = n
    runs = (
        -(-n // expected[name]) for name in counts if expected[name] for n in counts[name].values()
    )
    n_runs = max(runs, default=1)
    executed = {name: counts.get(name, {}) for name in expected}
    found.programs.append(
        ProgramFacts(
            name=module.origin,
            n_runs=n_runs,
            n_collectives=len(expected),
            n_as_compiled=sum(
                bool(by_device) and set(by_device.values()) == {expected[name] * n_runs}
                for name, by_device in executed.items()
            ),
            n_missing=sum(not by_device for by_device in executed.values()),
        )
    )
    times = recorded.group_by("name").agg(
        pl.col("start_ns").min(), pl.col("dur_ns").mean(), pl.col("exposed_ns").mean()
    )
    times_s = {name: (a * S, b * S, c * S) for name, a, b, c in times.iter_rows()}
    measured: list[Collective] = []
    for row, share in zip(compiled, _shares(compiled), strict=True):
        name = row.hlo_name or ""
        members = {device for group in row.groups for device in group}
        by_device = executed.get(name, {})
        counted = [n for device, n in by_device.items() if not members or device in members]
        if not counted:
            continue
        total = Fraction(row.count * sum(counted), expected[name] * len(counted))
        is_alike = (total / n_runs).denominator == 1  # else all runs together count as one step
        start_s, dur_s, exposed_s = times_s[name]
        measured.append(
            replace(
                row,
                source=Source.MEASURED,
                count=round(total / n_runs) if is_alike else max(1, round(total)),
                n_steps=n_runs if is_alike else 1,
                start_s=start_s,
                dur_s=dur_s * share,
                exposed_s=exposed_s * share,
                time_basis=Source.MEASURED.value,
            )
        )
    found.rows.extend([*(replace(row, n_steps=n_runs) for row in compiled), *measured])
    return measured


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


def _places(module: HloModule, measured: Sequence[Collective]) -> dict[str, Mapping[str, Any]]:
    """The layer, part and shape of the instructions; the layer of those in one layer."""
    places: dict[str, Mapping[str, Any]] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            scope = scope_of(instruction.op_name)
            layers = scope.layers or ()
            layer = layers[0] if len(layers) == 1 else None
            if layer is not None or scope.part is not None:
                places[instruction.name] = {"layer": layer, "part": scope.part}
    by_name: dict[str, list[Collective]] = defaultdict(list)
    for row in measured:
        by_name[row.hlo_name or ""].append(row)
    for name, same in by_name.items():
        facts = {f: {getattr(row, f) for row in same} for f in ("layer", "part", "shape")}
        places[name] = {
            f: values.pop() if len(values) == 1 else None for f, values in facts.items()
        }
    return places
