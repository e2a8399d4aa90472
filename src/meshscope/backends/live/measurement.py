"""Joins a profile with the HLO of its programs: measured rows, device loads, waiting, findings.

A measured row is a compiled row whose count is scaled by the recorded over the expected executions
of its instruction.

The programs of a live run with their collectives, and rows summed over the chunks of a prompt.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import polars as pl

from meshscope.events.collective import Collective
from meshscope.events.enums import Part, Phase, Source
from meshscope.events.measured import CollectiveTime, DeviceLoad
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.executions import call_sites
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.profile.executions import join_hlo, loads, participants, with_hlo
from meshscope.readers.profile.ops import Ops
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.steps import ops_in_steps
from meshscope.readers.profile.xplane import Profile
from meshscope.serialize import from_plain, picked

Key = tuple[str, str]  # module, instruction
StageKey = tuple[Phase | None, str | None, int | None]  # phase, instruction, stage

# Opcodes that name values and execute nothing.
_NOT_EXECUTED = frozenset({"parameter", "get-tuple-element", "tuple", "constant", "bitcast"})
# Facts of a collective that its event table row has under the same name.
_ROW_FACTS = (
    *("phase", "kind", "opcode", "axis", "axis_reason", "group_size", "n_groups", "groups"),
    *("dtype", "stage", "algorithm", "inserted_by", "crosses_slices", "hlo_shape", "source_line"),
)
_SAME = ("phase", "stage", "layer", "part", "kind", "axis", "groups", "dtype", "shape")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledProgram:
    """A program that ran `n_runs` times in a profile, and its collectives with the counts of one step."""

    phase: Phase
    module: HloModule
    rows: Sequence[Collective]
    n_runs: int


def summed_rows(parts: Sequence[Sequence[Collective]]) -> list[Collective]:
    """The rows of the last part with the counts of equal rows of the others, then all other rows."""
    summed: dict[Hashable, Collective] = {}
    for rows in reversed(parts):
        n_equal: Counter[Hashable] = Counter()
        for row in rows:
            same = tuple(getattr(row, name) for name in _SAME)
            key = (same, n_equal[same])
            n_equal[same] += 1
            known = summed.get(key)
            summed[key] = row if known is None else replace(known, count=known.count + row.count)
    return list(summed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRows:
    """The contents of a profile: measured `rows`, figures, and `ops` with a row per executed op."""

    rows: list[Collective]
    loads: tuple[DeviceLoad, ...]
    times: tuple[CollectiveTime, ...]
    findings: tuple[str, ...]
    ops: pl.DataFrame


def measured_of(
    profile: Profile, programs: Sequence[ProfiledProgram], *, n_steps: Mapping[Phase, int]
) -> ProfileRows:
    """Joins the profile of these programs to their compiled rows; it has `n_steps` of each phase."""
    ops = ops_in_steps(profile)
    # Without those between steps, such as creating a cache.
    instructions = ops.instructions.filter(
        pl.col("module").is_in([program.module.name for program in programs])
    )
    if not instructions.is_empty():
        events = ops.events.filter(pl.col("op").is_in(instructions["op"].implode()))
        ops = Ops(events=events, instructions=instructions)
    facts = _facts(programs)
    expected = _expected(programs)
    rows = _of_stages(join_hlo(ops, facts), programs)
    by_device = _expected_by_device(programs)
    faults = capture_faults(profile, with_hlo(ops, facts), expected={**expected, **by_device})
    steps = {program.phase: n_steps[program.phase] for program in programs}
    executed = (
        rows.filter(pl.col("kind").is_not_null()).group_by("module", "hlo_name", "device").len()
    )
    recorded = {(module, name, device): n for module, name, device, n in executed.iter_rows()}
    measured = [
        summed_rows([_measured_rows(recorded, p, expected) for p in programs if p.phase is phase])
        for phase in steps
    ]
    return ProfileRows(
        rows=[row for of_phase in measured for row in of_phase],
        loads=tuple(_loads(rows, steps)),
        times=tuple(_times(rows)),
        findings=tuple(faults),
        ops=rows,
    )


def _facts(programs: Sequence[ProfiledProgram]) -> dict[Key, dict[str, Any]]:
    facts: dict[Key, dict[str, Any]] = {}
    for program in programs:
        module = program.module
        for instruction in module.instructions:
            if instruction.opcode not in _NOT_EXECUTED:
                scope = scope_of(instruction.op_name)
                facts[module.name, instruction.name] = {
                    "phase": program.phase.value,
                    "opcode": instruction.opcode,
                    "part": scope.part,
                    "stage": scope.stages[0] if scope.stages else None,
                    "layers": list(scope.layers or ()),
                    "source_line": module.source_line(instruction),
                }
        for name, rows in _by_name(program).items():
            facts[module.name, name] = _collective_facts(rows)
    return facts


def _by_name(program: ProfiledProgram) -> dict[str, list[Collective]]:
    rows: dict[str, list[Collective]] = defaultdict(list)
    for row in program.rows:
        if row.hlo_name is not None:
            rows[row.hlo_name].append(row)
    return rows


def _collective_facts(rows: Sequence[Collective]) -> dict[str, Any]:
    """Facts of one instruction; bytes are summed over its arrays."""
    first = rows[0]
    arrays = [row for row in rows if row.layer == first.layer]
    parts = {row.part for row in arrays}
    sizes, wires = [row.payload_bytes for row in arrays], [row.wire_bytes for row in arrays]
    shape = first.shape if len(arrays) == 1 else None
    return {
        **picked(first, *_ROW_FACTS),
        "groups": [list(group) for group in first.groups],
        "part": parts.pop() if len(parts) == 1 else None,
        "shape": None if shape is None else list(shape),
        "payload_bytes": None if None in sizes else sum(filter(None, sizes)),
        "wire_bytes": None if None in wires else float(sum(filter(None, wires))),
        "layers": [
            layer
            for layer in dict.fromkeys(r.layer for r in rows if r.stage == first.stage)
            if layer is not None
        ],
    }


def _of_stages(rows: pl.DataFrame, programs: Sequence[ProfiledProgram]) -> pl.DataFrame:
    """The rows with the stage, layers and groups of the device; joined rows have the first stage's."""
    stage_of: dict[int, int] = {}
    for row in (row for program in programs for row in program.rows):
        if row.stage is not None and row.part is Part.STAGE:  # all stages send or receive
            for sender, receiver in row.groups:
                stage_of |= {sender: row.stage, receiver: row.stage + 1}
    if not stage_of:
        return rows
    stages = pl.DataFrame(
        list(stage_of.items()),
        schema={"device": rows.schema["device"], "of_device": rows.schema["stage"]},
        orient="row",
    )
    facts = pl.DataFrame(
        list(_stage_facts(programs)),
        schema={
            **{name: rows.schema[name] for name in ("module", "hlo_name")},
            "of_device": rows.schema["stage"],
            "n_layers_before": rows.schema["layer"],
            "of_stage": rows.schema["groups"],
        },
        orient="row",
    ).unique(["module", "hlo_name", "of_device"], keep="last")
    joined = rows.join(stages, on="device", how="left", maintain_order="left").join(
        facts, on=["module", "hlo_name", "of_device"], how="left", maintain_order="left"
    )
    # Without the number of the device, its stage and layer are unknown.
    is_of_all, is_known = pl.col("stage").is_null(), pl.col("of_device").is_not_null()
    layer = pl.col("layer") + pl.col("n_layers_before").fill_null(0)
    return joined.with_columns(
        pl.when(~is_of_all).then("of_device").alias("stage"),
        pl.when(is_of_all | is_known).then(layer).alias("layer"),
        pl.coalesce("of_stage", "groups").alias("groups"),
    ).select(rows.columns)


def _stage_facts(programs: Sequence[ProfiledProgram]) -> Iterator[tuple[Any, ...]]:
    """Module, instruction, stage, the layer offset from its first stage, and its groups."""
    for program in programs:
        module = program.module
        for instruction in module.instructions:
            scope = scope_of(instruction.op_name)
            for number, stage in enumerate(scope.stages or ()):
                yield module.name, instruction.name, stage, number * scope.stage_layers, None
        for name, rows in _by_name(program).items():
            in_stages = {row.stage: row for row in reversed(rows) if row.stage is not None}
            groups = {s: [list(group) for group in row.groups] for s, row in in_stages.items()}
            if rows[0].part is Part.STAGE:  # the last stage only receives
                yield module.name, name, max(groups) + 1, 0, groups[max(groups)]
            for stage, row in in_stages.items():
                before = (row.layer or 0) - (rows[0].layer or 0)
                yield module.name, name, stage, before, groups[stage]


def _expected(programs: Sequence[ProfiledProgram]) -> Mapping[Key, int]:
    """Executions of each collective instruction in one run of its module on one device."""
    counts: Counter[Key] = Counter()
    for program in programs:
        module, names = program.module, set(_by_name(program))
        for site in call_sites(module, lambda instruction, names=names: instruction.name in names):
            counts[module.name, site.instruction.name] += site.count
    return counts


def _expected_by_device(programs: Sequence[ProfiledProgram]) -> dict[Key, dict[int, int]]:
    """Executions by device, in one run, of instructions that only some stages execute."""
    counts: dict[Key, dict[int, int]] = defaultdict(dict)
    for program in programs:
        in_stages = _expected_in_stages(program.rows)
        for row in program.rows:
            if row.hlo_name is not None and _is_of_one_stage(row):
                n = in_stages[row.phase, row.hlo_name, row.stage]
                counts[program.module.name, row.hlo_name] |= dict.fromkeys(_devices(row), n)
    return counts


def _is_of_one_stage(row: Collective) -> bool:
    """Whether only the devices of its stage execute it; all devices execute stage sends."""
    return row.stage is not None and row.part is not Part.STAGE


def _measured_rows(
    recorded: Mapping[tuple[str, str, int | None], int],
    program: ProfiledProgram,
    expected: Mapping[Key, int],
) -> list[Collective]:
    """The compiled rows of a program that were recorded, with their measured counts."""
    compiled, module = program.rows, program.module
    in_stages = _expected_in_stages(compiled)
    stage_devices: dict[tuple[Phase | None, str | None], set[int]] = defaultdict(set)
    for row in compiled:
        if _is_of_one_stage(row):
            stage_devices[row.phase, row.hlo_name] |= _devices(row)
    measured: list[Collective] = []
    for row in compiled:
        if row.phase is None or row.hlo_name is None:
            continue
        key, devices = (module.name, row.hlo_name), _devices(row)
        n_recorded = Fraction(sum(recorded.get((*key, device), 0) for device in devices))
        if n_unknown := recorded.get((*key, None)):  # no device numbers: all devices run it alike
            sharing = stage_devices.get((row.phase, row.hlo_name))
            n_sharing = len(sharing) if sharing else module.n_devices
            n_recorded += Fraction(n_unknown * len(devices), n_sharing)
        n_expected = expected.get(key, 0)
        if row.stage is not None:
            n_expected = min(n_expected, in_stages[row.phase, row.hlo_name, row.stage])
        n_all = n_expected * len(devices) * program.n_runs
        if count := round(row.count * n_recorded / n_all) if n_all else 0:
            measured.append(replace(row, source=Source.MEASURED, count=count))
    return measured


def _devices(row: Collective) -> set[int]:
    return {device for group in row.groups for device in group}


def _expected_in_stages(compiled: Sequence[Collective]) -> dict[StageKey, int]:
    """Executions of an instruction in a step on a device of each stage."""
    by_stage: dict[StageKey, list[Collective]] = defaultdict(list)
    for row in compiled:
        by_stage[row.phase, row.hlo_name, row.stage].append(row)
    return {
        # All arrays of one layer belong to the same execution.
        key: sum(row.count for row in rows) // max(Counter(row.layer for row in rows).values())
        for key, rows in by_stage.items()
    }


def _loads(rows: pl.DataFrame, n_steps: Mapping[Phase, int]) -> Iterable[DeviceLoad]:
    """Load of each device, summed over the steps of each phase, without the time between steps."""
    wait_s = pl.when(pl.col("wait_s").is_not_null().all()).then(pl.col("wait_s").sum())
    for phase in n_steps:
        in_phase = rows.filter(pl.col("phase") == phase.value, pl.col("device").is_not_null())
        if in_phase.is_empty():
            continue
        steps = pl.concat(loads(step) for step in in_phase.partition_by("step"))
        summed = steps.group_by("device").agg(
            pl.col("busy_s", "collective_s", "idle_s", "window_s").sum(), wait_s
        )
        for record in summed.sort("device").iter_rows(named=True):
            yield DeviceLoad(phase=phase, **record)


def _times(rows: pl.DataFrame) -> Iterable[CollectiveTime]:
    """Mean transfer and waiting time, by phase, part, kind and axis."""
    collectives = participants(rows.filter(pl.col("phase").is_not_null()))
    keys = ["phase", "part", "kind", "axis"]
    means = collectives.group_by(keys, maintain_order=True).agg(
        pl.len().alias("n_executions"), pl.col("dur_s", "wire_s", "wait_s").mean()
    )
    for record in means.iter_rows(named=True):
        yield from_plain(CollectiveTime, record)
