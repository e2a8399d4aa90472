"""Exports a run for CCL-Bench: a folder with the workload card and a trace that its tools read.

The trace has the form of the TPU profiler's JSON (`json_tpu`): processes `/device:TPU:0`, ops with
`hlo_category`, `bytes_accessed`, `device_offset_ps`, `device_duration_ps`, and host steps under the
one name that the tools recognize. It is written only if executions have times. The metrics of
meshscope go to `meshscope/metrics.json`, in a folder of their own, because the tools read every
JSON file next to the card as a trace.

Source: tools/ of cornell-sysphotonics/ccl-bench@1d257f0.
"""

import gzip
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from meshscope.analysis.catalog import Unavailable, metric_inputs, metrics_of
from meshscope.events.enums import Kind, Phase
from meshscope.events.step_time import Activity
from meshscope.reports.export.card import CARD, card_text
from meshscope.reports.export.perfetto import CHROME
from meshscope.reports.export.run_timeline import COPIES, Execution, RunTimeline
from meshscope.store.run import RunRecord

Tables = Mapping[str, pl.DataFrame]  # rows of the run's own source, by metric
Value = Callable[[Tables], float | None]

COLLECTIVES = {
    "allreduce": Kind.ALL_REDUCE,
    "allgather": Kind.ALL_GATHER,
    "reducescatter": Kind.REDUCE_SCATTER,
    "alltoall": Kind.ALL_TO_ALL,
}
NOT_COMPUTED = "meshscope does not compute it"
NO_DATA = "the run lacks the events or times that it needs"


class CclMetric(NamedTuple):
    """A metric of CCL-Bench with meshscope's definition; `value` is None if it is not computed."""

    name: str
    unit: str
    definition: str
    value: Value | None = None


def ccl_metrics_document(run: RunRecord, *, n_steps: int | None) -> dict[str, Any]:
    """Every metric by name, with unit, definition, and value or reason."""
    source = run.manifest.source.value
    tables = {
        name: result.filter(pl.col("source") == source) if "source" in result.columns else result
        for name, result in metrics_of(metric_inputs(run)).items()
        if not isinstance(result, Unavailable)
    }
    entries: dict[str, Any] = {}
    for metric in CCL_METRICS:
        value = None if metric.value is None else metric.value(tables)
        is_known = value is not None and math.isfinite(value)
        ours = {"value": value if is_known else None, "definition": metric.definition}
        if not is_known:
            ours["reason"] = NOT_COMPUTED if metric.value is None else NO_DATA
        entries[metric.name] = {"unit": metric.unit, "ours": ours}
    return {"source": source, "n_steps_in_trace": n_steps, "metrics": entries}


def _of_first(*names: str, value: pl.Expr, **rows: str) -> Value:
    """The expression over these rows of the first metric that has some."""

    def of_first(tables: Tables) -> float | None:
        frames = (tables[name].filter(**rows) for name in names if name in tables)
        return next((frame.select(value).item() for frame in frames if len(frame)), None)

    return of_first


def _in_prefill(name: str, value: pl.Expr) -> Value:
    return _of_first(name, value=value, phase=Phase.PREFILL.value)


def _step_s(phase: Phase) -> Value:
    """Time of a step on the slowest device."""
    return _of_first("mfu", "overlap", value=pl.col("step_s").max(), phase=phase.value)


def _payload_gb(*kinds: Kind) -> Value:
    """Payload of one prefill step on one chip; unknown if the size of one collective is."""

    def payload_gb(tables: Tables) -> float | None:
        if "volume" not in tables:
            return None
        of_kinds = tables["volume"].filter(
            pl.col("phase") == Phase.PREFILL.value, pl.col("kind").is_in([k.value for k in kinds])
        )
        payload_bytes = float(of_kinds["payload_bytes"].sum())
        return None if of_kinds["n_unsized"].sum() else payload_bytes / 1e9

    return payload_gb


def _bus_gb_per_s(kind: Kind) -> Value:
    """Bus bandwidth of the collective of this kind that moves the most bytes."""
    largest = pl.col("busbw_bytes_per_s").sort_by(
        pl.col("payload_bytes") * pl.col("count"), descending=True
    )
    value = largest.first() / 1e9
    return _of_first("bandwidth", "measured_bandwidth", value=value, kind=kind.value)


_COLLECTIVE_S = pl.col("collective_s")
_DECODE_S, _PREFILL_S = _step_s(Phase.DECODE), _step_s(Phase.PREFILL)
_BANDWIDTH = (
    "bus bandwidth (wire bytes over duration, nccl-tests) of the collective with most bytes"
)
_VOLUME = "payload of one prefill step on one chip (nccl-tests size rule), 1 GB = 1e9 bytes"

CCL_METRICS: tuple[CclMetric, ...] = (
    CclMetric("avg_step_time", "s", "time of one decode step", _DECODE_S),
    CclMetric("ttft", "s", "time to first token: prefill, device time only", _PREFILL_S),
    CclMetric("tpot", "s", "time per output token after the first: a decode step", _DECODE_S),
    CclMetric(
        "mfu",
        "%",
        "model FLOPs (PaLM, appendix B) of a prefill step over peak x chips x step",
        _in_prefill("mfu", 100 * pl.col("mfu_frac").mean()),
    ),
    CclMetric("mean_sm_coverage", "%", "not defined for TPUs"),
    CclMetric("dominant_kernel_concentration", "%", "not computed: needs the kernels of a profile"),
    CclMetric("moe_fraction", "%", "not computed: see `volume` by part, moe.*"),
    CclMetric("average_memory_bandwidth", "GB/s", "not computed: see `mbu`, a share of HBM peak"),
    CclMetric("memory_transfer_overhead", "%", "not computed"),
    CclMetric(
        "communication_fraction",
        "%",
        "share of a prefill step with a running collective, asynchronous ones included",
        _in_prefill("overlap", 100 * (_COLLECTIVE_S / pl.col("step_s")).mean()),
    ),
    CclMetric(
        "total_communication_time",
        "s",
        "time of a prefill step with a running collective, mean over devices",
        _in_prefill("overlap", _COLLECTIVE_S.mean()),
    ),
    *(
        CclMetric(f"bandwidth_utilization_{name}_group_6", "GB/s", _BANDWIDTH, _bus_gb_per_s(kind))
        for name, kind in COLLECTIVES.items()
    ),
    CclMetric("bandwidth_utilization_peertopeer_group_6", "%", "not computed"),
    CclMetric(
        "compute_comm_overlap",
        "%",
        "share of the collective time of a device in which it computes",
        _in_prefill("overlap", 100 * pl.col("overlap_frac").mean()),
    ),
    CclMetric(
        "load_imbalance_ratio",
        "1 is balanced",
        "busy time of the busiest device over the mean, without waiting, in prefill",
        _in_prefill(
            "load_imbalance", pl.when(pl.len() == 1).then(pl.col("imbalance_without_wait").first())
        ),
    ),
    CclMetric("straggler", "share of 1", "not computed: see `waiting` and `load_imbalance`"),
    CclMetric("scale_up_bw_utility", "%", "not computed"),
    *(
        CclMetric(f"collective_vol_{name}_gb", "GB", _VOLUME, _payload_gb(kind))
        for name, kind in COLLECTIVES.items()
    ),
    CclMetric("collective_vol_total_gb", "GB", _VOLUME, _payload_gb(*COLLECTIVES.values())),
)


JSON_TPU = "json_tpu"
STEP = "$core.py:331 step"  # the only event that CCL-Bench recognizes as a step of vLLM
N_DECODE_STEPS = 3  # the tools drop the first step (prefill) and the last
NS_PER_US, PS_PER_NS = 1000, 1000
HOST_PID, OPS_TID = 1000, 2
PROFILE = Path("trace") / CHROME
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
    profile = None if run.path is None else run.path / PROFILE
    if profile is not None and profile.is_file():
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
    """Prefill, then decode steps back to back, on every device and as steps of the host."""
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
