"""What CCL-Bench's tools compute from a trace of `export --to ccl-bench`: their formulas for TPU traces.

Each is a fact about tools/ of cornell-sysphotonics/ccl-bench@1d257f0; `docs/ccl-bench.md` says where it departs from
the name of the metric.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from meshscope.events.intervals import CoveredTime

STEP = "$core.py:331 step"  # the only event that the tools recognize as a step of vLLM
KINDS = {
    "allreduce": "all-reduce", "allgather": "all-gather",
    "reducescatter": "reduce-scatter", "alltoall": "all-to-all",
}  # fmt: skip
PEAK_FLOPS_PER_S = {"tpu_v6e": 918e12}
_SEND = [*KINDS.values(), "collective-permute", "send", "recv", "broadcast"]  # categories
_NAMES = pl.col("name").str.contains("|".join((*KINDS.values(), "collective")))
_COMPUTES = pl.col("name").str.contains("dot|convolution|fusion|custom-call") & ~_NAMES
_PS_PER_S = 1e12
_OPS = {
    "name": pl.String, "pid": pl.Int64, "category": pl.String, "id": pl.String, "start": pl.Int64, "dur": pl.Int64,
    "n_bytes": pl.Int64, "flops": pl.Float64,
}  # fmt: skip


def tool_values(events: Sequence[Mapping[str, Any]], card: Mapping[str, Any]) -> dict[str, float]:
    """What `tools/main.py --metric NAME` prints for the trace, by metric; without those that it does not know."""
    ops = pl.DataFrame([*map(_op, (e for e in events if e["ph"] == "X"))], _OPS, orient="row")
    known = dict(_values(ops.filter(name=STEP), ops.drop_nulls("category"), card["workload"]))
    return {name: float(value) for name, value in known.items() if value is not None}


def _op(event: Mapping[str, Any]) -> tuple[Any, ...]:
    """The event by `_OPS`, times in ps."""
    facts, n = event["args"], int(event["args"].get("bytes_accessed", 0))
    ident = facts.get("all_reduce_unique_id", event["name"])
    start, dur = round(event["ts"] * 1e6), round(event["dur"] * 1e6)
    category, flops = facts.get("hlo_category"), float(facts.get("model_flops", 0))
    return event["name"], event["pid"], category, ident, start, dur, n, flops


def _values(
    steps: pl.DataFrame, ops: pl.DataFrame, workload: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    inner = steps[1:-1] if len(steps) > 2 else steps
    step_s = None if inner.is_empty() else inner.select(pl.col("dur").mean() / _PS_PER_S).item()
    yield "avg_step_time", step_s
    yield "ttft", steps.select(pl.col("dur").first() / _PS_PER_S).item()
    yield "tpot", step_s if len(steps) > 2 and (workload["data"]["output_len"] or 2) > 1 else None
    spec, products = workload["hardware"]["xpu_spec"], ops.filter(pl.col("flops") > 0)
    if (peak := PEAK_FLOPS_PER_S.get(spec["model"])) and len(products):
        rate = _sum(products, "flops") / _union(products).total() * _PS_PER_S
        yield "mfu", 100 * rate / peak / spec["total_count"]
    total, shares = pl.col("dur").sum(), ops.group_by("category").agg(pl.col("dur").sum())
    if _sum(ops, "dur"):
        yield (
            "dominant_kernel_concentration",
            shares.select(100 * pl.col("dur").max() / total).item(),
        )
        sent = pl.col("dur").filter(pl.col("category").is_in(_SEND)).sum() / total
        of_device = ops.filter(pl.col("dur") > 0).group_by("pid").agg(share=100 * sent)
        yield "communication_fraction", of_device["share"].mean()
    yield from _memory(ops, _sum(steps, "dur"))
    seconds = _sum(ops.filter(_NAMES), "dur") / _PS_PER_S
    yield "total_communication_time", seconds / (workload["model"]["iteration"] or 1)
    sending, computing = _union(ops.filter(_NAMES)), _union(ops.filter(_COMPUTES))
    total_ps = overlap_ps = 0
    for start, end in inner.select("start", end=pl.col("start") + pl.col("dur")).iter_rows():
        low, high = sending.starts.clip(start, end), sending.ends.clip(start, end)
        total_ps += (high - low).sum()
        overlap_ps += computing.within(low, high).sum()
    yield "compute_comm_overlap", 100 * overlap_ps / total_ps if total_ps else None
    for name, category in KINDS.items():
        of_kind, n = ops.filter(category=category), pl.col("pid").n_unique().over("id")
        yield f"collective_vol_{name}_gb", _sum(of_kind, "n_bytes") / 1e9
        factor = (2 if name == "allreduce" else 1) * (n - 1) / n
        rate = pl.col("n_bytes") / 2**30 * factor / pl.col("dur") * _PS_PER_S
        rates = of_kind.with_columns(rate=rate).filter(pl.col("n_bytes") > 0, pl.col("dur") > 0)
        yield f"bandwidth_utilization_{name}_group_6", rates["rate"].median()
    of_kinds = ops.filter(pl.col("category").is_in([*KINDS.values()]))
    yield "collective_vol_total_gb", _sum(of_kinds, "n_bytes") / 1e9


def _sum(ops: pl.DataFrame, name: str) -> float:
    return float(ops[name].sum())


def _union(ops: pl.DataFrame) -> CoveredTime:
    return CoveredTime.of(ops["start"].to_numpy(), (ops["start"] + ops["dur"]).to_numpy())


def _memory(ops: pl.DataFrame, steps_ps: float) -> Iterator[tuple[str, Any]]:
    """Copies between memories: bytes over time, and the time in which no device does anything else."""
    number = pl.col("name").str.extract(r"^copy-(?:start|done)\.(.*)").alias("number")
    is_start = pl.col("name").str.starts_with("copy-start")
    halves = ops.with_columns(number).drop_nulls("number")
    dones = halves.filter(~is_start).select("number", end="start")
    copies = (
        halves.filter(is_start)
        .join(dones, on="number")
        .with_columns(dur=pl.col("end") - pl.col("start"))
    )
    copies = copies.filter(pl.col("dur") > 0)
    sized = copies.filter(pl.col("n_bytes") > 0)
    if len(sized):
        rate = _sum(sized, "n_bytes") / _sum(sized, "dur") * _PS_PER_S
        yield "average_memory_bandwidth", rate / 1e9
    if len(copies) and steps_ps:
        copying, working = _union(copies), _union(ops.filter(pl.col("dur") > 0))
        hidden_ps = working.within(copying.starts, copying.ends).sum()
        yield "memory_transfer_overhead", 100 * (copying.total() - hidden_ps) / steps_ps
