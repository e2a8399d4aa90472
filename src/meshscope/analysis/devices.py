"""What devices did while steps were profiled: load, imbalance, idle, and waiting against wire."""

from collections.abc import Sequence
from dataclasses import asdict

import polars as pl

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
    """Seconds that each device was busy, in collectives, waiting in them, and idle, in profiled steps.

    busy + idle = window. `idle_frac` is idle over window, `collective_frac` collectives over busy time.

    Source: busy time by union of intervals, as XProf's device idle time; a container such as a loop is
    not counted beside what it contains.
    """
    table = pl.DataFrame([asdict(load) for load in loads], schema=_LOADS)
    window, busy = pl.col("window_s"), pl.col("busy_s")
    return table.with_columns(
        pl.when(window > 0).then(pl.col("idle_s") / window).alias("idle_frac"),
        pl.when(busy > 0).then(pl.col("collective_s") / busy).alias("collective_frac"),
    )


def load_imbalance(loads: Sequence[DeviceLoad]) -> pl.DataFrame:
    """Busy time of the busiest device over the mean of all devices, by phase; 1 is balanced.

    Time spent waiting in collectives is taken off first where it is known (`without_wait`): a device
    that waits for a slower one is not loaded.

    Source: Pearce et al., "Quantifying the Effectiveness of Load Balance Algorithms" (ICS 2012): the load
    imbalance metric, there with 1 subtracted.
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
    """Mean seconds of collectives on the wire, and waiting for the last participant, by sort.

    `wire_s` is the duration of the fastest participant, `wait_s` what the others spent beyond it, null
    where a single device was recorded. `wait_frac` is waiting over duration.

    Source: TraceLens, "NcclAnalyser" (latency by the minimum over ranks); nsys-jax takes the fastest
    device for the same reason. It errs where even the last participant waits.
    """
    table = pl.DataFrame([asdict(time) for time in times], schema=_TIMES)
    share = pl.when(pl.col("dur_s") > 0).then(pl.col("wait_s") / pl.col("dur_s"))
    return table.with_columns(share.alias("wait_frac"))
