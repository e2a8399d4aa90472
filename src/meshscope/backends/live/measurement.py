"""Joins a profile with the HLO of its programs: measured rows, device loads, waiting, findings.

A measured row is a compiled row whose count is scaled by the recorded over the expected executions
of its instruction.

The programs of a live run with their collectives, and rows summed over the chunks of a prompt.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import polars as pl

from meshscope.cost.array_traffic import products
from meshscope.cost.op_cost import copied
from meshscope.events.collective import Collective
from meshscope.events.enums import Part, Phase, Source
from meshscope.events.measured import CollectiveTime, DeviceLoad, StepLabel
from meshscope.events.schema import in_schema
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.collectives import by_instruction, expected_executions, instruction_facts
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, HloModule, Instruction
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE, op_class
from meshscope.readers.profile.executions import (
    OPS_SCHEMA,
    categorized,
    measured_executions,
    with_hlo,
)
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.steps import annotated_steps, step_of_events
from meshscope.readers.profile.xplane import Profile
from meshscope.readers.traces import device_times
from meshscope.readers.traces.device_times import LABELS, S
from meshscope.readers.traces.xplane import bounds_ns

Key = tuple[str, str]  # module, instruction

# Opcodes that name values and execute nothing.
_NOT_EXECUTED = frozenset({"parameter", "get-tuple-element", "tuple", "constant", "bitcast"})
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
    phases = {program.module.name: program.phase.value for program in programs}
    known = profile.ops.instructions.filter(pl.col("module").is_in(list(phases)))
    # Without those between steps, such as creating a cache.
    ops = profile.ops if known.is_empty() else profile.ops.only(known)
    facts, in_stages = _facts(programs)
    ops = categorized(with_hlo(ops, facts))
    rows = _of_stages(measured_executions(ops), in_stages, programs)
    step = step_of_events(profile, annotated_steps(profile), rows)
    rows = rows.with_columns(
        pl.Series("step", step).replace(-1, None),
        phase=pl.col("module").replace_strict(phases, default=None, return_dtype=pl.String),
    )
    expected = {
        (program.module.name, name): n
        for program in programs
        for name, n in expected_executions(program.module, program.rows).items()
    }
    executed = (
        rows.filter(pl.col("kind").is_not_null()).group_by("module", "hlo_name", "device").len()
    )
    recorded = {(module, name, device): n for module, name, device, n in executed.iter_rows()}
    steps = {program.phase: n_steps[program.phase] for program in programs}
    measured = [
        summed_rows([_measured_rows(recorded, p, expected) for p in programs if p.phase is phase])
        for phase in steps
    ]
    loads, times = _times(rows)
    number = pl.col("step").rank("dense").over("device") - 1
    return ProfileRows(
        rows=[row for of_phase in measured for row in of_phase],
        loads=loads,
        times=times,
        findings=tuple(capture_faults(profile, ops, rows, expected=expected)),
        ops=in_schema(rows.with_columns(number.alias("step")), OPS_SCHEMA),
    )


def _times(rows: pl.DataFrame) -> tuple[tuple[DeviceLoad, ...], tuple[CollectiveTime, ...]]:
    """The load of each device in the steps of each phase, and the mean times of collectives, as of any trace."""
    labels = {phase.value: LABELS.index(StepLabel(phase.value)) for phase in Phase}
    start_ns, end_ns = bounds_ns(rows)
    placed = rows.with_columns(
        start_ns=start_ns,
        dur_ns=end_ns - start_ns,
        label=pl.col("phase").replace_strict(labels, default=None, return_dtype=pl.Int8),
    ).drop_nulls(["step", "label"])
    matched = device_times.with_transfers(placed.drop_nulls("kind"))
    wait_ns = pl.col("dur_ns") - pl.col("wire_ns")
    waits = matched.drop_nulls("wire_ns").group_by("label", "device").agg(wait_ns.sum())
    wait_s = {(LABELS[label], device): ns * S for label, device, ns in waits.iter_rows()}
    # A transfer in the background blocks nothing.
    blocking = placed.filter(pl.col("core").is_null()).drop_nulls(["device", "exposed_s"])
    events, busy = device_times.with_exposure(blocking)
    spans = device_times.step_table(events)
    return (
        tuple(
            replace(load, wait_s=wait_s.get((load.label, load.device)))
            for load in device_times.loads(busy, spans)
        ),
        tuple(device_times.collective_times(matched)),
    )


def _facts(
    programs: Sequence[ProfiledProgram],
) -> tuple[dict[Key, dict[str, Any]], dict[tuple[str, str, int], tuple[int, Any]]]:
    """The facts of each instruction in its first stage; and for each stage its layer offset and groups."""
    facts: dict[Key, dict[str, Any]] = {}
    in_stages: dict[tuple[str, str, int], tuple[int, Any]] = {}
    for program in programs:
        module, flow = program.module, Dataflow(program.module)
        places = ((c, i) for c in module.computations.values() for i in c.instructions)
        for computation, instruction in places:
            scope, key = scope_of(instruction.op_name), (module.name, instruction.name)
            for number, stage in enumerate(scope.stages or ()):
                in_stages[*key, stage] = number * scope.stage_layers, None
            if instruction.opcode not in _NOT_EXECUTED:
                facts[key] = {
                    "opcode": instruction.opcode,
                    "part": scope.part,
                    "stage": scope.stages[0] if scope.stages else None,
                    "layers": list(scope.layers or ()),
                    "source_line": module.source_line(instruction),
                    **_work(flow, computation, instruction),
                }
        for name, rows in by_instruction(program.rows).items():
            facts[module.name, name] = instruction_facts(rows)
            of_stage = {row.stage: row for row in reversed(rows) if row.stage is not None}
            for stage, row in of_stage.items():
                before = (row.layer or 0) - (rows[0].layer or 0)
                in_stages[module.name, name, stage] = before, list(map(list, row.groups))
            if rows[0].part is Part.STAGE:  # the last stage only receives
                last = max(of_stage)
                groups = in_stages[module.name, name, last][1]
                in_stages[module.name, name, last + 1] = 0, groups
    return facts, in_stages


def _work(flow: Dataflow, computation: Computation, instruction: Instruction) -> dict[str, Any]:
    """What the instruction does, the FLOPs of its products, and the bytes of a copy between memories."""
    is_copy = instruction.opcode.endswith("-start") and instruction.opcode not in KIND_OF_OPCODE
    flops = float(sum(p.flops for p in products(flow, computation, instruction)))
    return {
        "op_class": op_class(flow, computation, instruction).value,
        "flops": flops or None,
        "hbm_bytes": copied(instruction).hbm_bytes if is_copy else None,
    }


def _of_stages(
    rows: pl.DataFrame,
    in_stages: Mapping[tuple[str, str, int], tuple[int, Any]],
    programs: Sequence[ProfiledProgram],
) -> pl.DataFrame:
    """The rows with the stage, layers and groups of the device; joined rows have the first stage's."""
    stage_of: dict[int, int] = {}
    for row in (row for program in programs for row in program.rows):
        if row.stage is not None and row.part is Part.STAGE:  # all stages send or receive
            for sender, receiver in row.groups:
                stage_of |= {sender: row.stage, receiver: row.stage + 1}
    if not stage_of:
        return rows
    schema: dict[str, Any] = {name: rows.schema[name] for name in ("module", "hlo_name")}
    schema |= {"of_device": pl.Int32, "n_before": pl.Int32, "of_stage": rows.schema["groups"]}
    facts = pl.DataFrame(
        [(*key, *of_stage) for key, of_stage in in_stages.items()], schema=schema, orient="row"
    )
    of_device = pl.col("device").replace_strict(stage_of, default=None, return_dtype=pl.Int32)
    joined = rows.with_columns(of_device=of_device).join(
        facts, on=["module", "hlo_name", "of_device"], how="left", maintain_order="left"
    )
    # Without the number of the device, its stage and layer are unknown.
    is_of_all, is_known = pl.col("stage").is_null(), pl.col("of_device").is_not_null()
    layer = pl.col("layer") + pl.col("n_before").fill_null(0)
    return joined.with_columns(
        pl.when(~is_of_all).then("of_device").alias("stage"),
        pl.when(is_of_all | is_known).then(layer).alias("layer"),
        pl.coalesce("of_stage", "groups").alias("groups"),
    ).select(rows.columns)


def _measured_rows(
    recorded: Mapping[tuple[str, str, int], int],
    program: ProfiledProgram,
    expected: Mapping[Key, Mapping[int, int]],
) -> list[Collective]:
    """The compiled rows of a program that were recorded, with their measured counts."""
    measured: list[Collective] = []
    for row in program.rows:
        key = (program.module.name, row.hlo_name or "")
        devices = {device for group in row.groups for device in group}
        n_recorded = sum(recorded.get((*key, device), 0) for device in devices)
        n_run = sum(expected.get(key, {}).get(device, 0) for device in devices)
        n_all = n_run * program.n_runs
        if count := round(Fraction(row.count * n_recorded, n_all)) if n_all else 0:
            measured.append(replace(row, source=Source.MEASURED, count=count))
    return measured
