"""Assigns ops to steps and phases and collectives to axes; makes rows, times, loads and the timeline.

A trace shows steps, not requests: `n_steps` counts the recorded steps of a class, and `count` the
executions in one of them on one device. If the steps of a class differ, all of them together count
as one step.

A profile of XLA holds the HLO of its programs, so each recorded collective has a compiled row with
its layer, part, shape and groups. A measured row is that row with the recorded count and times:
`count` is the executions in one run of the program on one device, `n_steps` the runs in the trace.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import polars as pl

from meshscope.errors import ParseError
from meshscope.events import measured
from meshscope.events.collective import SUBSETS, Collective, OtherOperation
from meshscope.events.enums import Kind, OpClass, Phase, Source, wire_factor
from meshscope.events.measured import ProgramFacts, StepLabel
from meshscope.events.schema import in_schema
from meshscope.events.timeline import DISTINCT_OPS_SCHEMA, EXECUTIONS_SCHEMA
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.collectives import (
    by_instruction,
    expected_executions,
    module_collectives,
)
from meshscope.readers.hlo.communication import other_operations
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.groups import CrossesSlices, one_slice
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.hlo.scopes import with_scopes
from meshscope.readers.hlo.semantics import op_class
from meshscope.readers.traces import device_times, names
from meshscope.readers.traces.collectives import is_named_like_communication
from meshscope.readers.traces.device_times import LABELS, S
from meshscope.readers.traces.groups import (
    NO_PLAN,
    PAIRS,
    ops_with_axes,
    order_of_ranks,
    positioned,
)
from meshscope.readers.traces.merge import MergedTrace
from meshscope.readers.traces.servers import phase_of
from meshscope.readers.traces.trace import BETWEEN_SLICES, Category
from meshscope.units import counted

NO_PART = "the trace names no parts of the model"
# Ops of XPlanes are named `program/instruction`; no kernel has a name of this form.
_INSTRUCTION = r"^[^/\s]*/([^/\s]+)$"
_MAX_NAMED = 4  # kernels in one message
# What tells collectives apart, and what else a row takes from its executions.
_KEYS = ("kind", "opcode", "axis", "dtype", "payload_bytes", "group_size")
_OF_ROW = ("stage", "start_s", "dur_s", "exposed_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRows:
    """The contents of a trace for a run.

    `executions` and `distinct_ops` are the timeline, in the form of `events.timeline`. Devices are
    positions in the mesh.
    """

    rows: tuple[Collective, ...]
    programs: tuple[ProgramFacts, ...]
    steps: tuple[measured.StepClass, ...]
    loads: tuple[measured.DeviceLoad, ...]
    times: tuple[measured.CollectiveTime, ...]
    transfers: tuple[measured.TransferTime, ...]
    waiting: tuple[str, ...]  # what a reader must know before the times of collectives
    n_profiled_steps: dict[Phase, int]
    findings: tuple[str, ...]
    other_operations: tuple[OtherOperation, ...]  # in programs, without rows
    executions: pl.DataFrame
    distinct_ops: pl.DataFrame


def attributed(
    trace: MergedTrace, mesh: Mesh | None, *, crosses_slices: CrossesSlices = one_slice
) -> TraceRows:
    """The rows of the trace; SpecError if it has ranks beyond the mesh.

    If the trace has the HLO of its programs, they have compiled rows, too.
    """
    order = order_of_ranks(trace, mesh)
    ops = ops_with_axes(trace.ops, mesh, order, crosses_slices=crosses_slices)
    ops = ops.with_columns(_with_peers(ops))
    in_steps, counts = device_times.labeled(trace.events, trace.steps)
    category = ops["category"].gather(in_steps["op"])
    events, busy = device_times.with_exposure(positioned(in_steps.with_columns(category), order))
    collectives = _collectives_of(events, ops, mesh)
    programs = _program_rows(trace.programs, collectives, mesh, crosses_slices)
    others = collectives.filter(~pl.col("op").is_in(list(programs.ops)))
    n_devices = _devices_of_stage(events["device"].unique(), mesh)
    rows, findings = _rows_of(others, ops, counts, n_devices, crosses_slices)
    matched = device_times.with_transfers(collectives)
    tokens = trace.steps.select("step", "prefill_tokens", "decode_tokens")
    steps = device_times.step_table(events).join(
        tokens, on="step", how="left", maintain_order="left"
    )
    steps = steps.sort("label", "start_ns")
    exposed_ns = pl.when("is_collective").then("exposed_ns").alias("exposed_ns")
    executions = events.with_columns(exposed_ns, step="step_number", step_class="label")
    rank_of = (lambda n: n) if order is None else order.positions.index
    return TraceRows(
        rows=(*programs.rows, *rows),
        programs=tuple(programs.programs),
        steps=tuple(device_times.step_classes(steps, counts)),
        loads=tuple(device_times.loads(busy, steps)),
        times=tuple(device_times.collective_times(matched)),
        transfers=tuple(device_times.transfer_times(matched)),
        waiting=tuple(device_times.waiting_findings(matched, rank_of)),
        n_profiled_steps={label.phase: n for label, n in counts.items() if label.phase is not None},
        findings=(
            *(() if order is None else order.findings()),
            *programs.findings,
            *findings,
            *_unread(events, ops, trace.programs),
            *_unknown(events, ops, collectives),
        ),
        other_operations=tuple(programs.others),
        executions=in_schema(executions, EXECUTIONS_SCHEMA),
        distinct_ops=_distinct_ops(ops, programs.places),
    )


def _with_peers(ops: pl.DataFrame) -> pl.Series:
    """The groups of each op; one that lists its own alone gets the groups of like ops without common devices, too."""
    columns = ("axis", "kind", "opcode", "dtype", "payload_bytes", "group_size", "group_name")
    # Groups without common devices, these devices, and the index of the groups in `listings`.
    sets: dict[tuple[Any, ...], list[tuple[dict[tuple[int, ...], None], set[int], int]]]
    sets = defaultdict(list)
    listings: list[Iterable[Sequence[int]] | None] = []
    places: list[int] = []
    for listed, *like in ops.select("groups", *columns).iter_rows():
        if not listed or len(listed) > 1 or len(listed[0]) == 1:
            places.append(len(listings))
            listings.append(listed)
            continue
        group, alike = tuple(listed[0]), sets[tuple(like)]
        fitting = (s for s in alike if group in s[0] or s[1].isdisjoint(group))
        if (disjoint := next(fitting, None)) is None:
            alike.append(disjoint := ({}, set(), len(listings)))
            listings.append(disjoint[0])
        disjoint[0][group] = None
        disjoint[1].update(group)
        places.append(disjoint[2])
    lists = [None if of is None else [list(group) for group in of] for of in listings]
    return pl.Series("groups", lists, ops.schema["groups"]).gather(places)


def _distinct_ops(ops: pl.DataFrame, places: Mapping[str, Mapping[str, Any]]) -> pl.DataFrame:
    is_copy = pl.col("category") == Category.COPY.value
    opcode = pl.when(is_copy).then(pl.lit("copy")).otherwise(pl.coalesce("opcode", "name"))
    facts = ops.select("kind", "payload_bytes", "group_size").iter_rows()
    wires = [_wire_bytes(*of_op) if of_op[0] else None for of_op in facts]
    known = {
        name: pl.Series([places.get(op, {}).get(name) for op in ops["name"]], dtype=dtype)
        for name, dtype in DISTINCT_OPS_SCHEMA.items()
        if name in {"layer", "part", "shape", "op_class"}
    }
    named = (op_class_of(*op).value for op in ops.select("name", "category").iter_rows())
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    of_name = pl.coalesce(known.pop("op_class"), pl.Series(list(named)))
    known["wire_bytes"] = pl.Series(
        [None if w is None else float(w) for w in wires], dtype=pl.Float64
    )
    rows = ops.with_columns(
        opcode.alias("opcode"),
        pl.col("name").str.extract(_INSTRUCTION).alias("hlo_name"),
        pl.col("groups").list.len().alias("n_groups"),
        pl.when(~is_collective).then(of_name).alias("op_class"),
        **known,
    )
    return in_schema(rows, DISTINCT_OPS_SCHEMA)


def op_class_of(name: str, category: str) -> OpClass:
    """What a kernel does by its name, if no HLO says it."""
    if category == Category.COPY.value:
        return OpClass.COPY
    classes = names("op_classes").items()
    return next((OpClass(c) for c, pattern in classes if re.search(pattern, name)), OpClass.OTHER)


def _wire_bytes(kind: str, payload_bytes: int | None, group_size: int | None) -> Fraction | None:
    if payload_bytes is None or group_size is None:
        return None
    return payload_bytes * wire_factor(Kind(kind), group_size)


def _collectives_of(events: pl.DataFrame, ops: pl.DataFrame, mesh: Mesh | None) -> pl.DataFrame:
    """The executed collectives with their facts, phase, and the stage of their device."""
    facts = ops.filter(pl.col("category") == Category.COLLECTIVE.value).drop_nulls("kind")
    columns = ["op", "name", *_KEYS, "groups"]
    rows = events.filter("is_collective").join(
        facts.select(columns), on="op", maintain_order="left"
    )
    stage = pl.lit(None, pl.Int32)
    if mesh is not None and mesh.size("pp") > 1:
        in_stage = ~pl.col("axis").fill_null("").str.split("+").list.contains("pp")
        is_sent = pl.col("kind").is_in([kind.value for kind in PAIRS])
        stage = pl.when(in_stage | is_sent).then(_stage_of(pl.col("device"), mesh))
    phases = pl.Series([label.phase for label in LABELS], dtype=pl.String)
    return rows.with_columns(stage.alias("stage"), phases.gather(rows["label"]).alias("phase"))


def _stage_of(device: pl.Expr, mesh: Mesh) -> pl.Expr:
    return (device // (mesh.n_devices // mesh.size("pp"))).cast(pl.Int32)


def _devices_of_stage(devices: pl.Series, mesh: Mesh | None) -> Mapping[int | None, int]:
    """Recorded devices of each stage, and of all stages under None."""
    counts: dict[int | None, int] = {None: len(devices)}
    if mesh is not None and mesh.size("pp") > 1:
        stages = devices.to_frame("device").select(_stage_of(pl.col("device"), mesh).alias("stage"))
        counts |= dict(stages.group_by("stage").len().iter_rows())
    return counts


def _rows_of(
    collectives: pl.DataFrame,
    ops: pl.DataFrame,
    counts: Mapping[StepLabel, int],
    n_devices: Mapping[int | None, int],
    crosses_slices: CrossesSlices,
) -> tuple[list[Collective], list[str]]:
    """The rows of each label in the order of their first execution, and findings about counts."""
    group_texts = pl.col("groups").list.eval(pl.element().cast(pl.List(pl.String)).list.join(","))
    n_of_device = pl.col("device").unique_counts()
    table = (
        collectives.with_columns(group_texts.list.join(";").alias("groups_text"))
        .group_by("label", "stage", *_KEYS, "groups_text", maintain_order=True)
        .agg(
            pl.len().alias("n"),
            n_of_device.min().alias("n_min"),
            n_of_device.max().alias("n_max"),
            pl.col("device").n_unique().alias("n_seen"),
            pl.col("op").first(),
            pl.col("dur_ns", "exposed_ns").mean() * S,
            pl.col("start_ns").min() * S,
        )
        .rename({"start_ns": "start_s", "dur_ns": "dur_s", "exposed_ns": "exposed_s"})
        .sort("label", "start_s", maintain_order=True)
    )
    rows: list[Collective] = []
    findings: list[str] = []
    for of_label in table.partition_by("label", maintain_order=True):
        label = LABELS[of_label["label"][0]]
        words = "steps" if label is StepLabel.STEP else f"{label.value} steps"
        n_steps = counts.get(label, 1)
        recorded = [n_devices[stage] for stage in of_label["stage"]]
        shares = [Fraction(n, of) for n, of in zip(of_label["n"], recorded, strict=True)]
        if n_steps > 1 and any((share / n_steps).denominator > 1 for share in shares):
            findings.append(
                f"{words} differ in their collectives: counts are of all {n_steps:,} together"
            )
            n_steps = 1
        findings += _uneven(words, of_label, recorded)
        for record, share in zip(of_label.iter_rows(named=True), shares, strict=True):
            op = ops.row(record["op"], named=True)
            groups = tuple(map(tuple, op["groups"] or ()))
            is_between = op["group_name"] == BETWEEN_SLICES
            reasons = (op["axis_reason"], label.reason, NO_PART)
            facts: dict[str, Any] = {name: record[name] for name in (*_KEYS, *_OF_ROW)}
            facts["kind"] = Kind(record["kind"])
            row = Collective(
                source=Source.MEASURED,
                phase=label.phase,
                layer=None,
                part=None,
                axis_reason="; ".join(reason for reason in reasons if reason),
                groups=groups,
                shape=None,
                wire_bytes=_wire_bytes(*(op[n] for n in ("kind", "payload_bytes", "group_size"))),
                count=max(1, round(share / n_steps)),
                n_steps=n_steps,
                crosses_slices=is_between or (crosses_slices(groups) if groups else None),
                time_basis=Source.MEASURED.value,
                **facts,
            )
            rows.append(row)
    return rows, list(dict.fromkeys(findings))


def _uneven(words: str, rows: pl.DataFrame, recorded: Sequence[int]) -> Iterator[str]:
    """The collective whose numbers of executions differ most between the recorded devices."""
    lowest = pl.when(pl.col("n_seen") < pl.Series(recorded)).then(0).otherwise("n_min")
    spread = rows.with_columns(lowest.alias("n_min")).with_columns(
        (pl.col("n_max") - pl.col("n_min")).alias("spread")
    )
    worst = spread.row(spread["spread"].arg_max() or 0, named=True)
    if worst["spread"]:
        axis = f" over {worst['axis']}" if worst["axis"] else ""
        yield (
            f"{words}: devices executed different numbers of a collective, such as "
            f"{worst['n_min']:,} to {worst['n_max']:,} of {worst['kind']}{axis}; counts are means"
        )


def _executed(events: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """The names of these ops with their numbers of executions, the most frequent first."""
    counts = events.join(ops.select("op", "name"), on="op").group_by("name").len()
    return counts.sort("len", "name", descending=[True, False])


def _unread(events: pl.DataFrame, ops: pl.DataFrame, programs: Collection[str]) -> Iterator[str]:
    """Kernels named like communication, and copies between devices, which have no rows."""
    is_known = pl.col("name").str.extract("^(.*)/").is_in(list(programs)).fill_null(value=False)
    kernels = ops.filter(~is_known, category=Category.COMPUTE.value)
    names_of = kernels["name"].str.replace(_INSTRUCTION, "$1")
    is_alike = [is_named_like_communication(name) for name in names_of]
    counts = _executed(events, kernels.filter(pl.Series(is_alike, dtype=pl.Boolean)))
    if len(counts):
        shown = [f"'{name}'" for name in counts["name"].head(_MAX_NAMED)]
        n, n_more = counts["len"].sum(), len(counts) - _MAX_NAMED
        more = [f"{n_more} more names"] if n_more > 0 else []
        yield (
            f"{n:,} kernel{'s' if n > 1 else ''} named like communication count{'s' if n == 1 else ''} as "
            f"compute: {', '.join([*shown, *more])}"
        )
    is_copy = pl.col("category") == Category.COPY.value
    peer = ops.filter(is_copy, pl.col("name").str.contains(names("kernels")["peer_copy"]))
    for name, n in _executed(events, peer).sort("name").iter_rows():
        yield f"{n:,} '{name}' between devices count{'s' if n == 1 else ''} as copies, without rows"


def _unknown(events: pl.DataFrame, ops: pl.DataFrame, collectives: pl.DataFrame) -> Iterator[str]:
    """Kernels that communicate without a name of a collective, and collectives of unknown bytes."""
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    counts = _executed(events, ops.filter(is_collective, pl.col("kind").is_null()))
    for name, n in counts.head(_MAX_NAMED).iter_rows():
        is_exchange = "sendrecv" in name.lower()
        which = "whether by send, receive or all-to-all" if is_exchange else "which collective"
        yield f"{counted(n, 'kernel')} '{name}' communicate{'s' if n == 1 else ''}; the trace does not say {which}"
    if n_more := int(counts["len"][_MAX_NAMED:].sum()):
        more = counted(len(counts) - _MAX_NAMED, "more name")
        yield f"{n_more:,} kernels with {more} communicate; the trace does not say which collective"
    unsized = collectives.filter(pl.col("payload_bytes").is_null())
    counts = unsized.group_by("opcode").len().sort("len", "opcode", descending=[True, False])
    if len(counts):
        named = [f"{n:,} '{opcode}'" for opcode, n in counts.head(_MAX_NAMED).iter_rows()]
        others = int(counts["len"][_MAX_NAMED:].sum())
        listed = ", ".join([*named, *([f"{counted(others, 'other')}"] if others else [])])
        yield f"the bytes of {listed} are unknown: the trace has no sizes for them"


@dataclass(frozen=True, slots=True)
class _ProgramRows:
    """Compiled and measured rows; `ops` are the rows of the trace's ops that they cover.

    `places` has the layer, part, class and shape of each instruction, by the name of its op.
    """

    rows: list[Collective] = field(default_factory=list[Collective])
    programs: list[ProgramFacts] = field(default_factory=list[ProgramFacts])
    ops: set[int] = field(default_factory=set[int])
    places: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    findings: list[str] = field(default_factory=list[str])
    others: list[OtherOperation] = field(default_factory=list[OtherOperation])


def _program_rows(
    programs: Mapping[str, str],
    collectives: pl.DataFrame,
    mesh: Mesh | None,
    crosses_slices: CrossesSlices,
) -> _ProgramRows:
    """The rows of all programs, HLO texts by name, from `collectives` of `_collectives_of`."""
    result = _ProgramRows()
    for program, text in programs.items():
        prefix = f"{program}/"
        recorded = collectives.filter(pl.col("name").str.starts_with(prefix)).with_columns(
            pl.col("name").str.strip_prefix(prefix)
        )
        try:
            module = parse_hlo(text, program)
            phases = recorded["phase"].unique()
            named = (phases[0] if len(phases) == 1 else None) or phase_of(module.name)
            phase = None if named is None else Phase(named)
            result.others.extend(other_operations(module, phase))
            if recorded.is_empty():
                continue
            module = with_scopes(module)
            compiled = _compiled_rows(module, mesh, crosses_slices, phase)
        except ParseError as error:
            if not recorded.is_empty():
                message = f"{error} Its collectives are read from the names of its events."
                result.findings.append(message)
            continue
        measured_rows = _add(result, module, compiled, recorded)
        for name, place in _places(module, measured_rows).items():
            result.places[prefix + name] = place
        names = [row.hlo_name for row in measured_rows]
        result.ops.update(recorded.filter(pl.col("name").is_in(names))["op"])
    return result


def _compiled_rows(
    module: HloModule, mesh: Mesh | None, crosses_slices: CrossesSlices, phase: Phase | None
) -> list[Collective]:
    """The rows of one run of the program in this phase; without a plan their axis is unknown."""
    collectives = module_collectives(
        module,
        mesh=mesh or Mesh(axes=(("device", module.n_devices),)),
        crosses_slices=crosses_slices,
    )
    rows = collectives.rows(default_phase=phase)
    if mesh is not None:
        return rows
    of_mesh = re.compile(rf" match no axis of the mesh| {SUBSETS} ")  # holds for no plan
    reasons = [[r for r in (row.axis_reason or "").split("; ") if r] for row in rows]
    others = ("; ".join([NO_PLAN, *(r for r in of if not of_mesh.search(r))]) for of in reasons)
    return [replace(r, axis=None, axis_reason=o) for r, o in zip(rows, others, strict=True)]


def _add(
    result: _ProgramRows, module: HloModule, compiled: Sequence[Collective], recorded: pl.DataFrame
) -> list[Collective]:
    """Adds the rows and facts of one program; its measured rows."""
    expected = expected_executions(module, compiled)
    executed: dict[str, dict[int, int]] = defaultdict(dict)
    for name, device, n in recorded.group_by("name", "device").len().iter_rows():
        executed[name][device] = n
    runs = (
        -(-n // expected[name][device])
        for name in expected
        for device, n in executed[name].items()
        if expected[name].get(device)
    )
    n_runs = max(runs, default=1)
    result.programs.append(
        ProgramFacts(
            name=module.origin,
            n_runs=n_runs,
            n_collectives=len(expected),
            n_as_compiled=sum(
                bool(executed[name])
                and all(n == of.get(d, 0) * n_runs for d, n in executed[name].items())
                for name, of in expected.items()
            ),
            n_missing=sum(not executed[name] for name in expected),
        )
    )
    means = pl.col("dur_ns", "exposed_ns").mean()
    times = recorded.group_by("name").agg(pl.col("start_ns").min(), means).rows_by_key("name")
    arrays: dict[tuple[str | None, int | None], list[Collective]] = defaultdict(list)
    for row in compiled:  # an instruction may combine several
        arrays[row.hlo_name, row.layer].append(row)
    measured_rows: list[Collective] = []
    for row in compiled:
        name, same = row.hlo_name or "", arrays[row.hlo_name, row.layer]
        members = {device for group in row.groups for device in group}
        counted = {d: n for d, n in executed[name].items() if not members or d in members}
        n_due = sum(expected.get(name, {}).get(device, 0) for device in counted)
        if not n_due:
            continue
        total = Fraction(row.count * sum(counted.values()), n_due)
        is_alike = (total / n_runs).denominator == 1  # else all runs together count as one step
        n_bytes = sum(other.payload_bytes or 0 for other in same)
        is_sized = n_bytes and all(other.payload_bytes is not None for other in same)
        share = (row.payload_bytes or 0) / n_bytes if is_sized else 1 / len(same)
        start_ns, dur_ns, exposed_ns = times[name][0]
        measured_rows.append(
            replace(
                row,
                source=Source.MEASURED,
                count=round(total / n_runs) if is_alike else max(1, round(total)),
                n_steps=n_runs if is_alike else 1,
                start_s=start_ns * S,
                dur_s=dur_ns * S * share,
                exposed_s=exposed_ns * S * share,
                time_basis=Source.MEASURED.value,
            )
        )
    result.rows.extend([*(replace(row, n_steps=n_runs) for row in compiled), *measured_rows])
    return measured_rows


def _places(module: HloModule, measured_rows: Sequence[Collective]) -> dict[str, Mapping[str, Any]]:
    """The layer, part, class and shape of the instructions; no layer if they have several."""
    places: dict[str, Mapping[str, Any]] = {}
    flow = Dataflow(module)
    for computation in module.computations.values():
        for instruction in computation.instructions:
            scope = scope_of(instruction.op_name)
            layers = scope.layers or ()
            layer = layers[0] if len(layers) == 1 else None
            done = op_class(flow, computation, instruction).value
            places[instruction.name] = {"layer": layer, "part": scope.part, "op_class": done}
    for name, same in by_instruction(measured_rows).items():
        facts = {f: {getattr(row, f) for row in same} for f in ("layer", "part", "shape")}
        places[name] = {f: v.pop() if len(v) == 1 else None for f, v in facts.items()}
    return places
