"""What CCL-Bench's tools compute from a trace of `export --to ccl-bench`: their formulas for TPU traces.

Each is a fact about tools/ of cornell-sysphotonics/ccl-bench@1d257f0; `docs/ccl-bench.md` says where it departs from
the name of the metric.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from meshscope.events.intervals import CoveredTime

Event = Mapping[str, Any]

STEP = "$core.py:331 step"  # the only event that the tools recognize as a step of vLLM
KINDS = {
    "allreduce": "all-reduce", "allgather": "all-gather",
    "reducescatter": "reduce-scatter", "alltoall": "all-to-all",
}  # fmt: skip
PEAK_FLOPS_PER_S = {"tpu_v6e": 918e12}
_COMMUNICATION = {*KINDS.values(), "collective-permute", "send", "recv", "broadcast"}
_COMMUNICATION_NAMES = (*KINDS.values(), "collective")
_COMPUTE_NAMES = ("dot", "convolution", "fusion", "custom-call")
_GIB, _PS_PER_S, _PS_PER_US = 2**30, 1e12, 1e6


def tool_values(events: Sequence[Event], card: Mapping[str, Any]) -> dict[str, float]:
    """What `tools/main.py --metric NAME` prints for the trace, by metric; without those that it does not know."""
    return dict(_values(events, card["workload"]))


def _values(events: Sequence[Event], workload: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    ops = [e for e in events if e["ph"] == "X" and "hlo_category" in e["args"]]
    steps = sorted((e for e in events if e["name"] == STEP), key=lambda e: e["ts"])
    steps_s = [e["dur"] / 1e6 for e in steps]
    if steps_s:
        yield "avg_step_time", fmean(steps_s[1:-1] if len(steps_s) > 2 else steps_s)
        yield "ttft", steps_s[0]
    if len(steps_s) > 2 and (workload["data"]["output_len"] or 2) > 1:
        yield "tpot", fmean(steps_s[1:-1])
    spec = workload["hardware"]["xpu_spec"]
    products = [e for e in ops if int(e["args"].get("model_flops", 0)) > 0 and e["dur"] > 0]
    if products and (peak := PEAK_FLOPS_PER_S.get(spec["model"])):
        flops = sum(int(e["args"]["model_flops"]) for e in products)
        active_s = _union(_span(e) for e in products).total() / _PS_PER_S
        yield "mfu", 100 * flops / active_s / peak / spec["total_count"]
    yield from _shares(ops)
    yield from _memory(ops, sum(e["dur"] for e in steps) * _PS_PER_US)
    named = [e for e in ops if _is_named(e, _COMMUNICATION_NAMES)]
    seconds = sum(_dur_ps(e) for e in named) / _PS_PER_S
    yield "total_communication_time", seconds / (workload["model"]["iteration"] or 1)
    yield from _overlap(events, [_span(e) for e in (steps[1:-1] if len(steps) > 2 else steps)])
    volumes = dict.fromkeys(KINDS, 0.0)
    for name, category in KINDS.items():
        of_kind = [e for e in ops if e["args"]["hlo_category"] == category]
        volumes[name] = sum(_accessed(e) for e in of_kind) / 1e9
        yield f"collective_vol_{name}_gb", volumes[name]
        if rates := list(_rates(of_kind, 2 if name == "allreduce" else 1)):
            yield f"bandwidth_utilization_{name}_group_6", median(rates)
    yield "collective_vol_total_gb", sum(volumes.values())


def _span(event: Event) -> tuple[int, int]:
    return round(event["ts"] * _PS_PER_US), round((event["ts"] + event["dur"]) * _PS_PER_US)


def _dur_ps(event: Event) -> float:
    return float(event["args"]["device_duration_ps"])


def _accessed(event: Event) -> int:
    return int(event["args"].get("bytes_accessed", 0))


def _is_named(event: Event, words: Sequence[str]) -> bool:
    return any(word in event["name"] for word in words)


def _union(spans: Iterator[tuple[int, int]]) -> CoveredTime:
    starts, ends = np.array([*spans], np.int64).reshape(-1, 2).T
    return CoveredTime.of(starts, ends)


def _shares(ops: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Shares of the durations of a device's events, of any device's events."""
    by_category, by_device = defaultdict[str, float](float), defaultdict[int, list[float]](list)
    for event in ops:
        category = event["args"]["hlo_category"]
        by_category[category] += _dur_ps(event)
        is_communication = category in _COMMUNICATION
        by_device[event["pid"]].append(_dur_ps(event) * (1 if is_communication else -1))
    if total := sum(by_category.values()):
        yield "dominant_kernel_concentration", 100 * max(by_category.values()) / total
        shares = [
            sum(max(0.0, d) for d in of_device) / sum(map(abs, of_device))
            for of_device in by_device.values()
            if any(of_device)
        ]
        yield "communication_fraction", 100 * fmean(shares)


def _memory(ops: Sequence[Event], steps_ps: float) -> Iterator[tuple[str, float]]:
    """Copies between memories: bytes over time, and the time in which no device does anything else."""
    starts = {e["name"][11:]: e for e in ops if e["name"].startswith("copy-start.")}
    dones = {e["name"][10:]: e for e in ops if e["name"].startswith("copy-done.")}
    at_ps = lambda event: int(event["args"]["device_offset_ps"])  # noqa: E731
    copies = {n: (at_ps(e), at_ps(dones[n])) for n, e in starts.items() if n in dones}
    copies = {n: (start, end) for n, (start, end) in copies.items() if end > start}
    if not copies:
        return
    sized = [n for n in copies if _accessed(starts[n])]
    if sized:
        total_ps = sum(copies[n][1] - copies[n][0] for n in sized)
        rate = sum(_accessed(starts[n]) for n in sized) / total_ps * _PS_PER_S
        yield "average_memory_bandwidth", rate / 1e9
    if steps_ps:
        others = (e for e in ops if not e["name"].startswith("copy-") and _dur_ps(e))
        working = _union((at_ps(e), at_ps(e) + int(_dur_ps(e))) for e in others)
        copying = _union(iter(copies.values()))
        hidden = working.within(copying.starts, copying.ends).sum()
        yield "memory_transfer_overhead", 100 * float(copying.total() - hidden) / steps_ps


def _overlap(
    events: Sequence[Event], steps: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, float]]:
    """The share of the time of collectives on any device in which any device computes."""
    shown = [e for e in events if e["ph"] == "X"]
    communicating = _union(_span(e) for e in shown if _is_named(e, _COMMUNICATION_NAMES))
    computing = _union(
        _span(e)
        for e in shown
        if _is_named(e, _COMPUTE_NAMES) and not _is_named(e, _COMMUNICATION_NAMES)
    )
    overlap_ps = total_ps = 0
    for start, end in steps:
        low = np.clip(communicating.starts, start, end)
        high = np.clip(communicating.ends, start, end)
        total_ps += int((high - low).sum())
        overlap_ps += int(computing.within(low, high).sum())
    if total_ps:
        yield "compute_comm_overlap", 100 * overlap_ps / total_ps


def _rates(of_kind: Sequence[Event], factor: int) -> Iterator[float]:
    """GiB accessed x factor x (n-1)/n per second of each event; n devices share its name or its group."""
    groups: dict[str, list[Event]] = defaultdict(list)
    for event in of_kind:
        groups[event["args"].get("all_reduce_unique_id", event["name"])].append(event)
    for members in groups.values():
        n = len({event["pid"] for event in members})
        for event in members:
            if _accessed(event) and (seconds := _dur_ps(event) / _PS_PER_S):
                yield _accessed(event) / _GIB * factor * (n - 1) / n / seconds
