"""The metrics of CCL-Bench, by its names, computed from a run by meshscope's definitions.

Definitions differ from CCL-Bench's tools on purpose: `docs/ccl-bench.md` lists how, metric by
metric. A value that is not known is null with its reason.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from meshscope.analysis.catalog import Unavailable, metrics_of
from meshscope.analysis.metric_inputs import metric_inputs
from meshscope.events.enums import Kind, Phase
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


@dataclass(frozen=True, slots=True)
class CclMetric:
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
    return {
        "source": source,
        "n_steps_in_trace": n_steps,
        "metrics": {metric.name: _entry(metric, tables) for metric in CCL_METRICS},
    }


def _entry(metric: CclMetric, tables: Tables) -> dict[str, Any]:
    value = None if metric.value is None else metric.value(tables)
    is_known = value is not None and math.isfinite(value)
    ours = {"value": value if is_known else None, "definition": metric.definition}
    reason = NOT_COMPUTED if metric.value is None else NO_DATA
    return {"unit": metric.unit, "ours": ours if is_known else {**ours, "reason": reason}}


def _prefill(tables: Tables, table: str) -> pl.DataFrame | None:
    """The rows of a metric in prefill; None if there are none."""
    rows = tables[table].filter(phase=Phase.PREFILL.value) if table in tables else None
    return None if rows is None or rows.is_empty() else rows


def _prefill_mean(table: str, column: str, *, scale: float = 1.0) -> Value:
    def mean(tables: Tables) -> float | None:
        rows = _prefill(tables, table)
        return None if rows is None else rows.select(scale * pl.col(column).mean()).item()

    return mean


def _step_s(phase: Phase) -> Value:
    """Time of a step on the slowest device."""

    def step_s(tables: Tables) -> float | None:
        for table in ("mfu", "overlap"):
            rows = tables[table].filter(phase=phase.value) if table in tables else pl.DataFrame()
            if not rows.is_empty():
                return rows.select(pl.col("step_s").max()).item()
        return None

    return step_s


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

    def bus_gb_per_s(tables: Tables) -> float | None:
        for table in ("bandwidth", "measured_bandwidth"):
            rows = tables[table].filter(kind=kind.value) if table in tables else pl.DataFrame()
            if not rows.is_empty():
                payload = pl.col("payload_bytes") * pl.col("count")
                return rows.sort(payload, descending=True)["busbw_bytes_per_s"][0] / 1e9
        return None

    return bus_gb_per_s


def _imbalance(tables: Tables) -> float | None:
    rows = _prefill(tables, "load_imbalance")
    return None if rows is None or len(rows) > 1 else rows["imbalance_without_wait"][0]


def _communication_percent(tables: Tables) -> float | None:
    rows = _prefill(tables, "overlap")
    share = pl.col("collective_s") / pl.col("step_s")
    return None if rows is None else rows.select(100 * share.mean()).item()


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
        _prefill_mean("mfu", "mfu_frac", scale=100),
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
        _communication_percent,
    ),
    CclMetric(
        "total_communication_time",
        "s",
        "time of a prefill step with a running collective, mean over devices",
        _prefill_mean("overlap", "collective_s"),
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
        _prefill_mean("overlap", "overlap_frac", scale=100),
    ),
    CclMetric(
        "load_imbalance_ratio",
        "1 is balanced",
        "busy time of the busiest device over the mean, without waiting, in prefill",
        _imbalance,
    ),
    CclMetric("straggler", "share of 1", "not computed: see `waiting` and `load_imbalance`"),
    CclMetric("scale_up_bw_utility", "%", "not computed"),
    *(
        CclMetric(f"collective_vol_{name}_gb", "GB", _VOLUME, _payload_gb(kind))
        for name, kind in COLLECTIVES.items()
    ),
    CclMetric("collective_vol_total_gb", "GB", _VOLUME, _payload_gb(*COLLECTIVES.values())),
)
