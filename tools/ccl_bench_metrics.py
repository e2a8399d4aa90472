"""Computes from an exported trace what CCL-Bench's tools compute from it, faults included.

python tools/ccl_bench_metrics.py EXPORT puts both values of each metric side by side for a folder
that `meshscope export --to ccl-bench` wrote. Read in cornell-sysphotonics/ccl-bench@1d257f0 for TPU
traces. Checked by running those tools on the trace of a compiled Llama-3.1-8B (3 layers, tp=8,
v6e-8): the nine metrics for which they return a value agree to nine digits.
`docs/ccl-bench.md` explains the differences.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

Event = Mapping[str, Any]
Metric = Callable[[Sequence[Event]], float | None]

GIB = 2**30
PS_PER_S, US_PER_S = 1e12, 1e6
STEP = "$core.py:331 step"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def ops(events: Sequence[Event]) -> list[Event]:
    """Events of devices."""
    return [e for e in events if e["ph"] == "X" and "hlo_category" in e["args"]]


def steps_s(events: Sequence[Event]) -> list[float]:
    """Durations of the host steps."""
    return [e["dur"] / US_PER_S for e in events if e["name"] == STEP]


def avg_step_time(events: Sequence[Event]) -> float | None:
    """Mean step; the first and the last are dropped if there are more than two."""
    steps = steps_s(events)
    kept = steps[1:-1] if len(steps) > 2 else steps
    return fmean(kept) if kept else None


def ttft(events: Sequence[Event]) -> float | None:
    """The first step."""
    return next(iter(steps_s(events)), None)


def tpot(events: Sequence[Event]) -> float | None:
    """Mean step without the first and the last."""
    kept = steps_s(events)[1:-1]
    return fmean(kept) if kept else None


def communication_fraction(events: Sequence[Event]) -> float | None:
    """Time of collectives over that of all ops, in percent, mean of the devices."""
    categories = {*KINDS, "collective-permute", "broadcast"}
    by_pid: dict[int, list[Event]] = defaultdict(list)
    for event in ops(events):
        by_pid[event["pid"]].append(event)
    shares: list[float] = []
    for of_device in by_pid.values():
        total = sum(e["dur"] for e in of_device)
        part = sum(e["dur"] for e in of_device if e["args"]["hlo_category"] in categories)
        shares.append(100 * part / total if total else 0.0)
    return fmean(shares) if shares else None


def total_communication_time(events: Sequence[Event]) -> float | None:
    """Time of ops named like collectives, summed over all devices, per step."""
    names = (*KINDS, "collective")
    collectives = [e for e in ops(events) if any(name in e["name"] for name in names)]
    seconds = sum(float(e["args"]["device_duration_ps"]) / PS_PER_S for e in collectives)
    return seconds / max(1, len(steps_s(events)))


def bandwidth(category: str) -> Metric:
    """Median over events of GiB accessed x f(n) per second."""

    def median_rate(events: Sequence[Event]) -> float | None:
        members: dict[str, list[Event]] = defaultdict(list)
        for event in ops(events):
            if event["args"]["hlo_category"] == category:
                members[event["name"]].append(event)
        rates: list[float] = []
        for same_name in members.values():
            n = len({event["pid"] for event in same_name})
            factor = (2 if category == "all-reduce" else 1) * (n - 1) / n
            for event in same_name:
                seconds = float(event["args"]["device_duration_ps"]) / PS_PER_S
                accessed = int(event["args"].get("bytes_accessed", 0))
                rates.append(accessed / GIB * factor / seconds if seconds else 0.0)
        return median(rates) if rates else None

    return median_rate


def volume(*categories: str) -> Metric:
    """Bytes accessed by collectives of these categories in the whole file, in GB."""

    def total(events: Sequence[Event]) -> float | None:
        arguments = [e["args"] for e in ops(events) if e["args"]["hlo_category"] in categories]
        return sum(int(a.get("bytes_accessed", 0)) for a in arguments) / 1e9

    return total


METRICS: dict[str, Metric] = {
    "avg_step_time": avg_step_time,
    "ttft": ttft,
    "tpot": tpot,
    "communication_fraction": communication_fraction,
    "total_communication_time": total_communication_time,
    **{f"bandwidth_utilization_{kind.replace('-', '')}_group_6": bandwidth(kind) for kind in KINDS},
    **{f"collective_vol_{kind.replace('-', '')}_gb": volume(kind) for kind in KINDS},
    "collective_vol_total_gb": volume(*KINDS),
}


def main() -> None:
    """Prints each metric of an exported folder: meshscope's value, CCL-Bench's value."""
    folder = Path(sys.argv[1])
    document = json.loads((folder / "meshscope" / "metrics.json").read_text())
    events = json.loads((folder / "steps.trace.json").read_text())["traceEvents"]
    for name, metric in METRICS.items():
        ours, theirs = document["metrics"][name]["ours"]["value"], metric(events)
        print(f"{name:40} {ours!s:>24} {theirs!s:>24}")


if __name__ == "__main__":
    main()
