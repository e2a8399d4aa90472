"""Exports a run for CCL-Bench: a folder with the workload card, a trace that its tools read, and our metrics.

The trace has the form of the TPU profiler's JSON (`json_tpu`), with host steps under the one name that the tools
recognize. The metrics are in a folder of their own: the tools read every JSON file next to the card as a trace.
Source: tools/ of cornell-sysphotonics/ccl-bench@1d257f0.
"""

import gzip
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.analysis.catalog import Unavailable, metric_inputs, metrics_of
from meshscope.events.enums import Kind, Phase
from meshscope.events.step_time import Activity
from meshscope.reports.charts.spec import read_yaml
from meshscope.reports.export.card import CARD, card_text
from meshscope.reports.export.timeline import COPIES, Execution, RunTimeline
from meshscope.store.run import RunRecord

COLLECTIVES = {
    "allreduce": Kind.ALL_REDUCE,
    "allgather": Kind.ALL_GATHER,
    "reducescatter": Kind.REDUCE_SCATTER,
    "alltoall": Kind.ALL_TO_ALL,
}
NOT_COMPUTED = "meshscope does not compute it"
NO_DATA = "the run lacks the events or times that it needs"


def ccl_metrics() -> Mapping[str, Sequence[str]]:
    """Unit and meshscope's definition of every metric of CCL-Bench."""
    return read_yaml("export/ccl_metrics.yaml")


def ccl_metrics_document(run: RunRecord, *, n_steps: int | None) -> dict[str, Any]:
    """Every metric by name, with unit, definition, and value or reason."""
    source = run.manifest.source.value
    tables = {
        name: result.filter(pl.col("source") == source) if "source" in result.columns else result
        for name, result in metrics_of(metric_inputs(run)).items()
        if not isinstance(result, Unavailable)
    }
    values, entries = dict(_values(tables)), dict[str, Any]()
    for name, (unit, definition) in ccl_metrics().items():
        value = values.get(name)
        is_known = value is not None and math.isfinite(value)
        ours = {"value": value if is_known else None, "definition": definition}
        if not is_known:
            ours["reason"] = NO_DATA if name in values else NOT_COMPUTED
        entries[name] = {"unit": unit, "ours": ours}
    return {"source": source, "n_steps_in_trace": n_steps, "metrics": entries}


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
STEP = "$core.py:331 step"  # the only event that CCL-Bench recognizes as a step of vLLM
N_DECODE_STEPS = 3  # the tools drop the first step (prefill) and the last
NS_PER_US, PS_PER_NS = 1000, 1000
HOST_PID, OPS_TID = 1000, 2
# Activities by the names of the TPU profiler, as XLA's HloOpCategory has them.
CATEGORIES = {
    Activity.MATMUL.value: "convolution fusion",
    Activity.KERNEL.value: "custom-call",
    Activity.RELAYOUT.value: "data formatting",
    Activity.ELEMENTWISE.value: "loop fusion",
}

Event = dict[str, Any]


def write_ccl_bench(run: RunRecord, timeline: RunTimeline, folder: Path) -> None:
    """Fills `folder` with the card, a trace if executions have times, and the metrics."""
    traces: tuple[str, ...] = ()
    n_steps: int | None = None
    profiles = () if run.path is None else (run.path / "trace").glob("*.trace.json.gz")
    if profile := next(iter(profiles), None):  # by the profiler
        traces = (JSON_TPU,)
        with gzip.open(profile) as packed, (folder / "profile.trace.json").open("wb") as out:
            shutil.copyfileobj(packed, out)
        n_steps = None if run.measured is None else sum(run.measured.n_profiled_steps.values())
    elif timeline.is_time:
        traces = (JSON_TPU,)
        n_steps = 1 + N_DECODE_STEPS * any(s.phase == Phase.DECODE.value for s in timeline.steps)
        document = {"displayTimeUnit": "ns", "traceEvents": list(_events(timeline))}
        (folder / "steps.trace.json").write_text(json.dumps(document, separators=(",", ":")))
    (folder / CARD).write_text(card_text(run, traces=traces, n_steps=n_steps))
    metrics = folder / "meshscope" / "metrics.json"
    metrics.parent.mkdir()
    document = ccl_metrics_document(run, n_steps=n_steps)
    metrics.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


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
    start_ns = execution.start_ns + shift_ns
    arguments = {
        "hlo_category": _category(execution),
        "device_offset_ps": str(start_ns * PS_PER_NS),
        "device_duration_ps": str(execution.dur_ns * PS_PER_NS),
    }
    payload_bytes = execution.arguments.get("payload_bytes")
    if execution.kind is not None and payload_bytes is not None:  # input and output
        is_shared = execution.kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}
        smaller_frac = 1 / len(execution.groups[0]) if is_shared else 1.0
        accessed = str(round(payload_bytes * (1 + smaller_frac)))
        arguments |= {"bytes_accessed": accessed, "raw_bytes_accessed": accessed}
        if execution.kind is Kind.ALL_REDUCE:
            arguments["all_reduce_unique_id"] = str(occurrence)
    name = f"{arguments['hlo_category'].replace(' ', '_')}.{occurrence}"
    for device in filter(execution.is_on, timeline.devices):
        yield {
            "ph": "X", "pid": device + 1, "tid": OPS_TID, "name": name,
            "ts": start_ns / NS_PER_US, "dur": execution.dur_ns / NS_PER_US, "args": arguments,
        }  # fmt: skip


def _category(execution: Execution) -> str:
    if execution.kind is not None:
        prefix = "collective-" if execution.kind is Kind.PERMUTE else ""
        return prefix + execution.kind.value.replace("_", "-")
    if execution.lane.startswith(COPIES):
        return "data formatting"
    return CATEGORIES.get(execution.arguments.get("activity", ""), "non-fusion elementwise")
