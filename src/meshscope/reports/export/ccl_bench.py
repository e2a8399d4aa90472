"""Exports a run for CCL-Bench: a folder with the workload card, a trace that its tools read, and our metrics.

The trace has the form of the TPU profiler's JSON (`json_tpu`), with host steps under the one name that the tools
recognize, and packed once more for the tool that reads `.json.gz` alone. The metrics are in a folder of their own:
the tools read every JSON file next to the card as a trace. Each has meshscope's value, and what `tools/main.py` prints
for this trace. Source: tools/ of cornell-sysphotonics/ccl-bench@1d257f0.
"""

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.analysis.catalog import Unavailable, metric_inputs, metrics_of
from meshscope.events.enums import Kind, OpClass, Phase
from meshscope.events.step_time import Activity
from meshscope.reports.charts.spec import read_yaml
from meshscope.reports.export.card import card_of, yaml_of
from meshscope.reports.export.ccl_tools import STEP, tool_values
from meshscope.reports.export.timeline import (
    COPIES,
    NAMED_CLASSES,
    Execution,
    RunTimeline,
    is_in_background,
)
from meshscope.store.run import RunRecord

COLLECTIVES = {
    "allreduce": Kind.ALL_REDUCE,
    "allgather": Kind.ALL_GATHER,
    "reducescatter": Kind.REDUCE_SCATTER,
    "alltoall": Kind.ALL_TO_ALL,
}
NOT_COMPUTED = "meshscope does not compute it"
# Metrics whose definition of CCL-Bench is meshscope's, too.
AS_THE_TOOLS = (
    "dominant_kernel_concentration",
    "average_memory_bandwidth",
    "memory_transfer_overhead",
)
CHECK = "python tools/main.py --trace FOLDER --metric NAME  # in a checkout of CCL-Bench: ccl_bench.value"
NOTHING_IN_TRACE = "the trace has no such events"
NO_DATA = "the run lacks the events or times that it needs"


def ccl_metrics() -> Mapping[str, Sequence[str]]:
    """Unit and meshscope's definition of every metric of CCL-Bench, and why its tool has no value for a TPU."""
    return read_yaml("export/ccl_metrics.yaml")


def ccl_metrics_document(
    run: RunRecord, timeline: RunTimeline, *, n_steps: int | None, printed: Mapping[str, float]
) -> dict[str, Any]:
    """Every metric by name, with unit, definition, value or reason, and what CCL-Bench's tool prints.

    Step times are of the steps in the trace, if it has times.
    """
    source = run.manifest.source.value
    tables = {
        name: result.filter(pl.col("source") == source) if "source" in result.columns else result
        for name, result in metrics_of(metric_inputs(run)).items()
        if not isinstance(result, Unavailable)
    }
    values, entries = dict(_values(tables)), dict[str, Any]()
    values |= {name: printed.get(name) for name in AS_THE_TOOLS}
    steps_s = {s.phase: s.dur_ns / 1e9 for s in timeline.steps if timeline.is_time and s.dur_ns}
    of_phase = {"ttft": Phase.PREFILL, "tpot": Phase.DECODE, "avg_step_time": Phase.DECODE}
    values |= {name: steps_s[phase] for name, phase in of_phase.items() if phase in steps_s}
    for name, (unit, definition, *no_form) in ccl_metrics().items():
        value = values.get(name)
        is_known = value is not None and math.isfinite(value)
        ours = {"value": value if is_known else None, "definition": definition}
        if not is_known:
            ours["reason"] = NO_DATA if name in values else NOT_COMPUTED
        theirs: dict[str, Any] = {"value": printed.get(name)}
        if name not in printed:
            theirs["reason"] = no_form[0] if no_form else NOTHING_IN_TRACE
        entries[name] = {"unit": unit, "ours": ours, "ccl_bench": theirs}
    facts = {"source": source, "n_steps_in_trace": n_steps, "check": CHECK}
    return {**facts, "metrics": entries}


def _values(tables: Mapping[str, pl.DataFrame]) -> Iterator[tuple[str, float | None]]:
    def of_first(*names: str, value: pl.Expr, **rows: str) -> float | None:
        frames = (tables[name].filter(**rows) for name in names if name in tables)
        return next((frame.select(value).item() for frame in frames if len(frame)), None)

    def in_prefill(name: str, value: pl.Expr) -> float | None:
        return of_first(name, value=value, phase=Phase.PREFILL.value)

    def payload_gb(*kinds: Kind) -> float | None:  # unknown if the size of one collective is
        if "volume" not in tables:
            return None
        is_kind = pl.col("kind").is_in([kind.value for kind in kinds])
        rows = tables["volume"].filter(is_kind, phase=Phase.PREFILL.value)
        return None if rows["n_unsized"].sum() else float(rows["payload_bytes"].sum()) / 1e9

    prefill_s, decode_s = (  # on the slowest device
        of_first("mfu", "overlap", value=pl.col("step_s").max(), phase=phase.value)
        for phase in (Phase.PREFILL, Phase.DECODE)
    )
    yield from {"avg_step_time": decode_s, "ttft": prefill_s, "tpot": decode_s}.items()
    yield "mfu", in_prefill("mfu", 100 * pl.col("mfu_frac").mean())
    share = 100 * (pl.col("collective_s") / pl.col("step_s")).mean()
    yield "communication_fraction", in_prefill("overlap", share)
    yield "total_communication_time", in_prefill("overlap", pl.col("collective_s").mean())
    yield "compute_comm_overlap", in_prefill("overlap", 100 * pl.col("overlap_frac").mean())
    imbalance = pl.when(pl.len() == 1).then(pl.col("imbalance_without_wait").first())
    yield "load_imbalance_ratio", in_prefill("load_imbalance", imbalance)
    most_bytes = pl.col("payload_bytes") * pl.col("count")
    largest = pl.col("busbw_bytes_per_s").sort_by(most_bytes, descending=True).first() / 1e9
    for name, kind in COLLECTIVES.items():
        busbw = of_first("bandwidth", value=largest, kind=kind.value)
        yield f"bandwidth_utilization_{name}_group_6", busbw
        yield f"collective_vol_{name}_gb", payload_gb(kind)
    yield "collective_vol_total_gb", payload_gb(*COLLECTIVES.values())


JSON_TPU = "json_tpu"
TRACE = "steps.trace.json"
N_DECODE_STEPS = 3  # the tools drop the first step (prefill) and the last
NS_PER_US, PS_PER_NS = 1000, 1000
HOST_PID, OPS_TID = 1000, 2
# Activities and classes by the names of the TPU profiler, as XLA's HloOpCategory has them.
CATEGORIES = {
    Activity.MATMUL.value: "convolution fusion",
    Activity.KERNEL.value: "custom-call",
    Activity.OTHER_KERNEL.value: "custom-call",
    Activity.RELAYOUT.value: "data formatting",
    Activity.ELEMENTWISE.value: "loop fusion",
    OpClass.MATMUL.value: "convolution fusion",
    OpClass.ATTENTION.value: "convolution fusion",
    OpClass.COPY.value: "data formatting",
}

Event = dict[str, Any]


def write_ccl_bench(
    run: RunRecord, timeline: RunTimeline, folder: Path, name: str
) -> dict[str, Any]:
    """Fills `folder`, which will have this name, with card, trace and metrics; returns the metrics.

    The trace has a prefill step and three times the decode step, if executions have times.
    """
    events: list[Event] = []
    n_steps = None
    if timeline.is_time:
        n_steps = 1 + N_DECODE_STEPS * any(s.phase == Phase.DECODE.value for s in timeline.steps)
        events = list(_events(timeline))
        document = {"displayTimeUnit": "ns", "traceEvents": events}
        text = json.dumps(document, separators=(",", ":"))
        (folder / TRACE).write_text(text)
        workload, plan = run.manifest.experiment.workload, run.manifest.experiment.plan
        batch, tp = workload and workload.batch, plan and plan.tp
        # Sizes are read from this name, and the ending sets it apart from the trace that the other tools read.
        packed = folder / f"BATCH-{batch}-TP-{tp}.json.gz"
        packed.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
    card = card_of(run, traces=(JSON_TPU,) if events else (), n_steps=n_steps)
    (folder / f"{name}.yaml").write_text(yaml_of(card))
    metrics = folder / "meshscope" / "metrics.json"
    metrics.parent.mkdir()
    printed = tool_values(events, card) if events else {}
    document = ccl_metrics_document(run, timeline, n_steps=n_steps, printed=printed)
    metrics.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return document


def _events(timeline: RunTimeline) -> Iterator[Event]:
    processes = {HOST_PID: "/host:CPU", **{d + 1: f"/device:TPU:{d}" for d in timeline.devices}}
    for pid, name in processes.items():
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        if pid != HOST_PID:
            thread = {"ph": "M", "pid": pid, "tid": OPS_TID, "name": "thread_name"}
            yield {**thread, "args": {"name": "XLA Ops"}}
    at_ns, n_before = 0, 0
    for step in timeline.steps:
        executions = [e for e in timeline.executions if e.phase == step.phase and not e.is_received]
        for _ in range(N_DECODE_STEPS if step.phase == Phase.DECODE.value else 1):
            yield {
                "ph": "X", "pid": HOST_PID, "tid": 1, "name": STEP, "ts": at_ns / NS_PER_US,
                "dur": step.dur_ns / NS_PER_US, "args": {"step": step.name},
            }  # fmt: skip
            for execution in executions:
                occurrence = n_before + execution.collective_id
                shift_ns = at_ns - step.start_ns
                yield from _execution_events(timeline, execution, shift_ns, occurrence)
            at_ns += step.dur_ns
            n_before += max((e.collective_id for e in executions), default=0)


def _execution_events(
    timeline: RunTimeline, execution: Execution, shift_ns: int, occurrence: int
) -> Iterator[Event]:
    facts, start_ns = execution.arguments, execution.start_ns + shift_ns
    category, hlo_name = _category(execution), facts.get("hlo_name")
    arguments = {"hlo_category": category, "hlo_name": hlo_name, "phase": execution.phase}
    arguments |= {n: facts[n] for n in ("op_class", "part", "layer", "axis") if n in facts}
    payload_bytes, n_bytes = facts.get("payload_bytes"), facts.get("hbm_bytes")
    if execution.kind is not None and payload_bytes is not None:  # input and output
        is_shared = execution.kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}
        smaller_frac = 1 / len(execution.groups[0]) if is_shared else 1.0
        n_bytes = round(payload_bytes * (1 + smaller_frac))
    if n_bytes:
        arguments |= dict.fromkeys(("bytes_accessed", "raw_bytes_accessed"), str(n_bytes))
    # The tools compare with the peak of all chips.
    if facts.get("flops") and len(timeline.devices) == timeline.n_devices:
        arguments["model_flops"] = str(round(facts["flops"]))
    if execution.kind is not None and facts.get("dtype") and facts.get("shape") is not None:
        arguments["shape_with_layout"] = f"{facts['dtype']}[{','.join(map(str, facts['shape']))}]"
    name, op_class = category.replace(" ", "_"), facts.get("op_class")
    name = f"{op_class}_{name}" if op_class in NAMED_CLASSES else name
    for device in filter(execution.is_on, timeline.devices):
        # Devices that share a name, or this id, form a group for the tools.
        ident = "_".join(map(str, (occurrence, *execution.groups_of(device))))
        if execution.kind is Kind.ALL_REDUCE:
            arguments = arguments | {"all_reduce_unique_id": ident}
        if execution.lane == COPIES and is_in_background(execution):
            number = occurrence * timeline.n_devices + device
            for half, at_ns in (("start", start_ns), ("done", start_ns + execution.dur_ns)):
                yield _event(f"copy-{half}.{number}", device, at_ns, 0, arguments)
        else:
            yield _event(f"{name}.{ident}", device, start_ns, execution.dur_ns, arguments)


def _event(
    name: str, device: int, start_ns: int, dur_ns: int, arguments: Mapping[str, Any]
) -> Event:
    times = {"device_offset_ps": start_ns * PS_PER_NS, "device_duration_ps": dur_ns * PS_PER_NS}
    return {
        "ph": "X", "pid": device + 1, "tid": OPS_TID, "name": name, "ts": start_ns / NS_PER_US,
        "dur": dur_ns / NS_PER_US, "args": {**arguments, **{n: str(t) for n, t in times.items()}},
    }  # fmt: skip


def _category(execution: Execution) -> str:
    facts = execution.arguments
    if execution.kind is not None:
        prefix = "collective-" if execution.kind is Kind.PERMUTE else ""
        return prefix + execution.kind.value.replace("_", "-")
    if execution.lane == COPIES and is_in_background(execution):
        return "copy-start"
    if facts.get("opcode") == "custom-call":
        return "custom-call"
    known = (facts.get(name, "") for name in ("activity", "op_class"))
    return next((CATEGORIES[n] for n in known if n in CATEGORIES), "non-fusion elementwise")
