"""Assigns ops to steps and phases and collectives to axes; makes rows, times, loads and the timeline.

A trace shows steps, not requests: `n_steps` counts the recorded steps of a class, and `count` the
executions in one of them on one device. If the steps of a class differ, all of them together count
as one step.

A profile of XLA holds the HLO of its programs, so each recorded collective has a compiled row with
its layer, part, shape and groups. A measured row is that row with the recorded count and times:
`count` is the executions in one run of the program on one device, `n_steps` the runs in the trace.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Any

import polars as pl

from meshscope.errors import ParseError
from meshscope.events.collective import SUBSETS, Collective
from meshscope.events.enums import Kind, Phase, Source, wire_factor
from meshscope.events.measured import (
    CollectiveTime,
    DeviceLoad,
    ProgramFacts,
    StepClass,
    StepLabel,
    TransferTime,
)
from meshscope.events.timeline import DISTINCT_OPS_SCHEMA, EXECUTIONS_SCHEMA
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.executions import call_sites
from meshscope.readers.hlo.groups import CrossesSlices
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.hlo.scopes import with_scopes
from meshscope.readers.profile.ops import in_schema
from meshscope.readers.traces.collectives import is_named_like_communication
from meshscope.readers.traces.device_times import (
    LABELS,
    S,
    collective_times,
    labeled,
    loads,
    step_classes,
    step_table,
    transfer_times,
    waiting_findings,
    with_exposure,
    with_transfers,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRows:
    """The contents of a trace for a run.

    `executions` and `distinct_ops` are the timeline, in the form of `events.timeline`. Devices are
    positions in the mesh.
    """

    rows: tuple[Collective, ...]
    programs: tuple[ProgramFacts, ...]
    steps: tuple[StepClass, ...]
    loads: tuple[DeviceLoad, ...]
    times: tuple[CollectiveTime, ...]
    transfers: tuple[TransferTime, ...]
    waiting: tuple[str, ...]  # what a reader must know before the times of collectives
    n_profiled_steps: dict[Phase, int]
    findings: tuple[str, ...]
    executions: pl.DataFrame
    distinct_ops: pl.DataFrame


def attributed(
    trace: MergedTrace, mesh: Mesh | None, *, crosses_slices: CrossesSlices = lambda _: None
) -> TraceRows:
    """The rows of the trace; SpecError if it has ranks beyond the mesh.

    If the trace has the HLO of its programs, they have compiled rows, too.
    """
    order = order_of_ranks(trace, mesh)
    ops = ops_with_axes(trace.ops, mesh, order, crosses_slices=crosses_slices)
    ops = ops.with_columns(_with_peers(ops))
    in_steps, counts = labeled(trace)
    events, times = with_exposure(positioned(in_steps, order), ops)
    collectives = _collectives_of(events, ops, mesh)
    phases = pl.Series([label.phase for label in LABELS], dtype=pl.String)
    named = collectives.with_columns(
        ops["name"].gather(collectives["op"]).alias("name"),
        phases.gather(collectives["label"]).alias("phase"),
    )
    programs = _program_rows(trace.programs, named, mesh=mesh, crosses_slices=crosses_slices)
    others = collectives.filter(~pl.col("op").is_in(list(programs.ops)))
    n_devices = _devices_of_stage(events["device"].unique(), mesh)
    rows, findings = _rows_of(others, ops, counts, n_devices, crosses_slices)
    matched = with_transfers(collectives, ops)
    steps = step_table(events, trace.steps, counts)
    exposed_ns = pl.when("is_collective").then("exposed_ns").alias("exposed_ns")
    executions = events.with_columns(exposed_ns, step="step_number", step_class="label")
    return TraceRows(
        rows=(*programs.rows, *rows),
        programs=tuple(programs.programs),
        steps=tuple(step_classes(steps, counts)),
        loads=tuple(loads(times, steps)),
        times=tuple(collective_times(matched)),
        transfers=tuple(transfer_times(matched)),
        waiting=tuple(
            waiting_findings(matched, lambda n: n if order is None else order.positions.index(n))
        ),
        n_profiled_steps={label.phase: n for label, n in counts.items() if label.phase is not None},
        findings=(
            *(() if order is None else order.findings()),
            *programs.findings,
            *findings,
            *_unread(events, ops),
            *_unknown(events, ops, collectives),
        ),
        executions=in_schema(executions, EXECUTIONS_SCHEMA),
        distinct_ops=_distinct_ops(ops, programs.places),
    )


def _with_peers(ops: pl.DataFrame) -> pl.Series:
    """The groups of each op; one that lists its own alone has those of like ops without common devices, too."""
    columns = ("axis", "kind", "opcode", "dtype", "payload_bytes", "group_size", "group_name")
    sets: dict[tuple[Any, ...], list[dict[tuple[int, ...], None]]] = defaultdict(list)
    groups: list[Iterable[Sequence[int]] | None] = []
    for listed, *like in ops.select("groups", *columns).iter_rows():
        if not listed or len(listed) > 1 or len(listed[0]) == 1:
            groups.append(listed)
            continue
        group, alike = tuple(listed[0]), sets[tuple(like)]
        fitting = (s for s in alike if group in s or not {*group} & {*chain.from_iterable(s)})
        if (disjoint := next(fitting, None)) is None:
            alike.append(disjoint := {})
        disjoint[group] = None
        groups.append(disjoint)
    lists = [None if of_op is None else [list(group) for group in of_op] for of_op in groups]
    return pl.Series("groups", lists, ops.schema["groups"])


def _distinct_ops(ops: pl.DataFrame, places: Mapping[str, Mapping[str, Any]]) -> pl.DataFrame:
    """The facts of the distinct ops by name, with what the HLO of their program adds."""
    is_copy = pl.col("category") == Category.COPY.value
    opcode = pl.when(is_copy).then(pl.lit("copy")).otherwise(pl.coalesce("opcode", "name"))
    facts = ops.select("kind", "payload_bytes", "group_size").iter_rows()
    wires = [_wire_bytes(*of_op) if of_op[0] else None for of_op in facts]
    known = ops.with_columns(
        opcode.alias("opcode"),
        pl.col("name").str.extract(_INSTRUCTION).alias("hlo_name"),
        pl.col("groups").list.len().alias("n_groups"),
        pl.Series("wire_bytes", [None if w is None else float(w) for w in wires], pl.Float64),
        *(
            pl.Series(fact, [places.get(name, {}).get(fact) for name in ops["name"]], dtype)
            for fact, dtype in DISTINCT_OPS_SCHEMA.items()
            if fact in {"layer", "part", "shape"}
        ),
    )
    return in_schema(known, DISTINCT_OPS_SCHEMA)


def _wire_bytes(kind: str, payload_bytes: int | None, group_size: int | None) -> Fraction | None:
    if payload_bytes is None or group_size is None:
        return None
    return payload_bytes * wire_factor(Kind(kind), group_size)


def _collectives_of(events: pl.DataFrame, ops: pl.DataFrame, mesh: Mesh | None) -> pl.DataFrame:
    """The executed collectives with their facts and the stage of their device."""
    facts = ops.filter(
        pl.col("category") == Category.COLLECTIVE.value, pl.col("kind").is_not_null()
    ).select("op", "kind", "opcode", "axis", "dtype", "payload_bytes", "group_size", "groups")
    rows = events.filter("is_collective").join(facts, on="op", maintain_order="left")
    stage = pl.lit(None, pl.Int32)
    if mesh is not None and mesh.size("pp") > 1:
        in_stage = ~pl.col("axis").fill_null("").str.split("+").list.contains("pp")
        is_sent = pl.col("kind").is_in([kind.value for kind in PAIRS])
        stage = pl.when(in_stage | is_sent).then(_stage_of(pl.col("device"), mesh))
    return rows.with_columns(stage.alias("stage"))


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
    keys = ["label", "stage", "kind", "opcode", "axis", "dtype", "payload_bytes", "group_size"]
    group_texts = pl.col("groups").list.eval(pl.element().cast(pl.List(pl.String)).list.join(","))
    n_of_device = pl.col("device").unique_counts()
    table = (
        collectives.with_columns(group_texts.list.join(";").alias("groups_text"))
        .group_by(*keys, "groups_text", maintain_order=True)
        .agg(
            pl.len().alias("n"),
            n_of_device.min().alias("n_min"),
            n_of_device.max().alias("n_max"),
            pl.col("device").n_unique().alias("n_seen"),
            pl.col("op").first(),
            pl.col("dur_ns", "exposed_ns").mean(),
            pl.col("start_ns").min(),
        )
        .sort("label", "start_ns", maintain_order=True)
    )  # fmt: skip
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
            facts = ops.row(record["op"], named=True)
            counted_record = record | {"count": max(1, round(share / n_steps)), "n_steps": n_steps}
            rows.append(_row(counted_record, facts, label, crosses_slices))
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


def _row(
    record: Mapping[str, Any],
    facts: Mapping[str, Any],
    label: StepLabel,
    crosses_slices: CrossesSlices,
) -> Collective:
    groups = tuple(map(tuple, facts["groups"] or ()))
    is_between = facts["group_name"] == BETWEEN_SLICES
    reasons = (facts["axis_reason"], label.reason, NO_PART)
    return Collective(
        source=Source.MEASURED,
        phase=label.phase,
        layer=None,
        part=None,
        kind=Kind(record["kind"]),
        opcode=facts["opcode"],
        axis=facts["axis"],
        axis_reason="; ".join(reason for reason in reasons if reason),
        group_size=facts["group_size"],
        groups=groups,
        dtype=facts["dtype"],
        shape=None,
        payload_bytes=facts["payload_bytes"],
        wire_bytes=_wire_bytes(record["kind"], facts["payload_bytes"], facts["group_size"]),
        stage=record["stage"],
        count=record["count"],
        n_steps=record["n_steps"],
        crosses_slices=is_between or (crosses_slices(groups) if groups else None),
        start_s=record["start_ns"] * S,
        dur_s=record["dur_ns"] * S,
        exposed_s=record["exposed_ns"] * S,
        time_basis=Source.MEASURED.value,
    )


def _unread(events: pl.DataFrame, ops: pl.DataFrame) -> Iterator[str]:
    """Kernels that count as compute and whose names say that they communicate."""
    is_compute = pl.col("category") == Category.COMPUTE.value
    kernels = ops.filter(is_compute, ~pl.col("name").str.contains("/", literal=True))
    is_alike = [is_named_like_communication(name) for name in kernels["name"]]
    alike = kernels.filter(pl.Series(is_alike, dtype=pl.Boolean)).select("op", "name")
    counts = events.join(alike, on="op").group_by("name").len()
    if len(counts):
        ordered = counts.sort("len", "name", descending=[True, False])
        names = [f"'{name}'" for name in ordered["name"].head(_MAX_NAMED)]
        n, n_more = counts["len"].sum(), len(counts) - _MAX_NAMED
        more = [f"{n_more} more names"] if n_more > 0 else []
        yield (
            f"{n:,} kernel{'s' if n > 1 else ''} named like communication count{'s' if n == 1 else ''} as "
            f"compute: {', '.join([*names, *more])}"
        )


def _unknown(events: pl.DataFrame, ops: pl.DataFrame, collectives: pl.DataFrame) -> Iterator[str]:
    """Kernels that communicate without a name of a collective, and collectives of unknown bytes."""
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    unnamed = ops.filter(is_collective, pl.col("kind").is_null()).select("op", "name")
    counts = events.filter("is_collective").join(unnamed, on="op").group_by("name").len()
    for name, n in counts.sort("len", descending=True).head(_MAX_NAMED).iter_rows():
        yield f"{counted(n, 'kernel')} '{name}' communicate{'s' * (n == 1)}; the trace does not say which collective"
    unsized = collectives.filter(pl.col("payload_bytes").is_null())
    counts = unsized.group_by("opcode").len().sort("len", "opcode", descending=[True, False])
    for opcode, n in counts.head(_MAX_NAMED).iter_rows():
        yield f"the bytes of {n:,} '{opcode}' are unknown: the trace has no sizes for them"
    if len(counts) > _MAX_NAMED:
        others = counts["len"][_MAX_NAMED:].sum()
        yield f"the bytes of {others:,} other collectives are unknown"


@dataclass(frozen=True, slots=True)
class _ProgramRows:
    """Compiled and measured rows; `ops` are the rows of the trace's ops that they cover.

    `places` has the layer, part and shape of each instruction, by the name of its op.
    """

    rows: list[Collective] = field(default_factory=list[Collective])
    programs: list[ProgramFacts] = field(default_factory=list[ProgramFacts])
    ops: set[int] = field(default_factory=set[int])
    places: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    findings: list[str] = field(default_factory=list[str])


def _program_rows(
    programs: Mapping[str, str],
    collectives: pl.DataFrame,
    *,
    mesh: Mesh | None,
    crosses_slices: CrossesSlices,
) -> _ProgramRows:
    """The rows of all programs; `programs` are HLO texts by name.

    `collectives` has a row per recorded execution: name (`program/instruction`), op, device, phase,
    start_ns, dur_ns and exposed_ns.
    """
    result = _ProgramRows()
    for program, text in programs.items():
        prefix = f"{program}/"
        recorded = collectives.filter(pl.col("name").str.starts_with(prefix)).with_columns(
            pl.col("name").str.strip_prefix(prefix)
        )
        if recorded.is_empty():
            continue
        try:
            module = with_scopes(parse_hlo(text, program), ())
            compiled = _compiled_rows(module, mesh, crosses_slices, recorded["phase"].unique())
        except ParseError as error:
            result.findings.append(
                f"{error} Its collectives are read from the names of its events."
            )
            continue
        measured = _add(result, module, compiled, recorded)
        for name, place in _places(module, measured).items():
            result.places[prefix + name] = place
        names = [row.hlo_name for row in measured]
        result.ops.update(recorded.filter(pl.col("name").is_in(names))["op"])
    return result


def _compiled_rows(
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
    result: _ProgramRows, module: HloModule, compiled: Sequence[Collective], recorded: pl.DataFrame
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
    result.programs.append(
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
        if not counted or not expected[name]:
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
    result.rows.extend([*(replace(row, n_steps=n_runs) for row in compiled), *measured])
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
    """The layer, part and shape of the instructions; no layer if they have several."""
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
