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
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshscope.events.enums import Kind, Phase
from meshscope.events.step_time import Activity
from meshscope.reports.export.card import CARD, card_text
from meshscope.reports.export.ccl_metrics import ccl_metrics_document
from meshscope.reports.export.profile_traces import CHROME
from meshscope.reports.export.run_timeline import COPIES, Execution, RunTimeline
from meshscope.store.run import RunRecord

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
    yield _name_event(HOST_PID, None, "/host:CPU")
    for device in timeline.devices:
        yield _name_event(device + 1, None, f"/device:TPU:{device}")
        yield _name_event(device + 1, OPS_TID, "XLA Ops")
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


def _name_event(pid: int, tid: int | None, name: str) -> Event:
    thread = {} if tid is None else {"tid": tid}
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "pid": pid, **thread, "name": kind, "args": {"name": name}}


def _execution_events(
    timeline: RunTimeline, execution: Execution, shift_ns: int, occurrence: int
) -> Iterator[Event]:
    """The execution on each device that takes part in it."""
    start_ns = execution.start_ns + shift_ns
    arguments = {
        "hlo_category": _category(execution),
        "device_offset_ps": str(start_ns * PS_PER_NS),
        "device_duration_ps": str(execution.dur_ns * PS_PER_NS),
        **_collective_arguments(execution, occurrence),
    }
    name = f"{arguments['hlo_category'].replace(' ', '_')}.{occurrence}"
    for device in timeline.devices:
        if not execution.is_on(device):
            continue
        yield {
            "ph": "X", "pid": device + 1, "tid": OPS_TID, "name": name,
            "ts": start_ns / NS_PER_US, "dur": execution.dur_ns / NS_PER_US, "args": arguments,
        }  # fmt: skip


def _category(execution: Execution) -> str:
    if execution.kind is Kind.PERMUTE:
        return "collective-permute"
    if execution.kind is not None:
        return execution.kind.value.replace("_", "-")
    if execution.lane.startswith(COPIES):
        return "data formatting"
    return CATEGORIES.get(execution.arguments.get("activity", ""), "non-fusion elementwise")


def _collective_arguments(execution: Execution, occurrence: int) -> dict[str, str]:
    """Bytes of input and output, as the TPU profiler counts them."""
    payload_bytes = execution.arguments.get("payload_bytes")
    if execution.kind is None or payload_bytes is None:
        return {}
    n = len(execution.groups[0])
    accessed = str(round(payload_bytes * (1 + _smaller_side_frac(execution.kind, n))))
    unique = {"all_reduce_unique_id": str(occurrence)} if execution.kind is Kind.ALL_REDUCE else {}
    return {"bytes_accessed": accessed, "raw_bytes_accessed": accessed, **unique}


def _smaller_side_frac(kind: Kind, n: int) -> float:
    """The smaller of input and output over the larger, which is the payload."""
    return 1 / n if kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER} else 1.0
