"""Load, idle time and waiting of devices in the profiled steps."""

from collections.abc import Sequence
from dataclasses import asdict

import polars as pl

from meshscope.analysis.overlap import ratio
from meshscope.events.measured import CollectiveTime, DeviceLoad

_LOADS = {
    "phase": pl.String,
    "device": pl.Int32,
    **dict.fromkeys(("busy_s", "collective_s", "wait_s", "idle_s", "window_s"), pl.Float64),
}
_TIMES = {
    **dict.fromkeys(("phase", "part", "kind", "axis"), pl.String),
    "n_executions": pl.Int64,
    **dict.fromkeys(("dur_s", "wire_s", "wait_s"), pl.Float64),
}


def device_idle(loads: Sequence[DeviceLoad]) -> pl.DataFrame:
    """Seconds of each device in the profiled steps: busy, in collectives, waiting in collectives, and idle.

    `window_s` = `busy_s` + `idle_s`. `idle_frac` = idle / window, `collective_frac` = collective / busy.

    Source: busy time is a union of intervals, as in XProf's device idle time. Containers such as loops
    are excluded, because their bodies are counted.
    """
    table = pl.DataFrame([asdict(load) for load in loads], schema=_LOADS)
    return table.with_columns(
        ratio("idle_s", "window_s").alias("idle_frac"),
        ratio("collective_s", "busy_s").alias("collective_frac"),
    )


def load_imbalance(loads: Sequence[DeviceLoad]) -> pl.DataFrame:
    """Load imbalance of a phase: busy time of the busiest device over the mean of all devices.

    1 is balanced. `imbalance_without_wait` subtracts the time that devices wait in collectives, because a
    device that waits for a slower one is not loaded. It is null if waiting is unknown.

    Source: Pearce et al., "Quantifying the Effectiveness of Load Balance Algorithms" (ICS 2012), whose
    load imbalance metric subtracts 1.
    """
    table = pl.DataFrame([asdict(load) for load in loads], schema=_LOADS)
    working = pl.col("busy_s") - pl.col("wait_s")
    return table.group_by("phase", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("n_devices"),
        (pl.col("busy_s").max() / pl.col("busy_s").mean()).alias("imbalance"),
        pl.when(pl.col("wait_s").is_not_null().all())
        .then(working.max() / working.mean())
        .alias("imbalance_without_wait"),
    )


def waiting(times: Sequence[CollectiveTime]) -> pl.DataFrame:
    """Mean seconds of collectives in transfer, and waiting for the last participant.

    `wire_s` is the duration of the fastest participant, `wait_s` the mean time that the others spend
    beyond it, `wait_frac` = wait / duration. `wait_s` is null if only one device is recorded.

    Source: TraceLens, "NcclAnalyser" (minimum over ranks); nsys-jax also takes the fastest device. The
    split underestimates waiting if even the last participant waits.
    """
    table = pl.DataFrame([asdict(time) for time in times], schema=_TIMES)
    return table.with_columns(ratio("wait_s", "dur_s").alias("wait_frac"))
