"""Transfers between slices that the Megascale runtime records, over the data center network.

Newer profiles have the plane `/device:CUSTOM:Megascale Trace`, whose events `NetworkSend` and
`NetworkReceive` name their device in the stat `graph_key`: `device_200001_gid_...` is device 1 of
slice 2. In older ones, the host has events `MegaScale: Communication Transport Send` and `Receive`,
with the collective, slices, devices, bytes and time in their stats; such an event marks the end.
Sources: openxla/xprof, convert/megascale_perfetto/xspace_loader.cc and convert/dcn_utils.cc;
openxla/xla, tsl/profiler/utils/xplane_schema.cc.
"""

import re
from collections.abc import Iterator
from typing import Any

import polars as pl

from meshscope.events.enums import Kind
from meshscope.readers.profile.ops import PS
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.session import Profile
from meshscope.readers.traces.trace import Category

STATS = (
    *("graph_key", "dcn_label", "dcn_source_slice_id", "dcn_source_per_slice_device_id"),
    *("dcn_destination_slice_id", "dcn_destination_per_slice_device_id"),
    *("payload_size_bytes", "duration_us"),
)
GROUP = "between slices"  # as the description of their process group
STREAM = 1_000_000
PLANE = "/device:CUSTOM:Megascale"
_KINDS = {
    "NetworkSend": Kind.SEND,
    "NetworkReceive": Kind.RECV,
    "MegaScale: Communication Transport Send": Kind.SEND,
    "MegaScale: Communication Transport Receive": Kind.RECV,
}
_DEVICE = re.compile(r"device_(\d+)_")
SCHEMA: dict[str, Any] = {
    "name": pl.String,
    "kind": pl.String,
    "category": pl.String,
    "payload_bytes": pl.Int64,
    "device": pl.Int32,
    "start_s": pl.Float64,
    "dur_s": pl.Float64,
}


def slice_transfers(profile: Profile) -> pl.DataFrame:
    """Transfers by SCHEMA, and the copies between host and device for them; empty without any."""
    has_transfers = {
        host
        for host, _, plane, _ in profile.planes()
        if plane.name.startswith(PLANE) and len(plane.events)
    }
    parts = [pl.DataFrame(schema=SCHEMA)]
    for host, _, plane, base_s in profile.planes():
        devices = profile.ops.events.filter(pl.col("host") == host)["device"]
        known = devices.drop_nulls().unique().sort().to_list() or [0]
        if plane.name.startswith(PLANE):
            parts.append(_placed(_of_plane(plane), known, base_s))
        elif plane.name.startswith("/host:") and host not in has_transfers:
            parts.append(_placed(_of_host(plane), known, base_s))
    return pl.concat(parts)


def _of_plane(plane: Plane) -> pl.DataFrame:
    """Events of the Megascale plane with `number`, the device as the runtime numbers it."""
    events = _named(plane)
    if "stat.graph_key" not in events:
        return events.with_columns(
            pl.lit(None, pl.Int64).alias("number"), pl.lit(None, pl.Int64).alias("payload_bytes")
        )
    key = pl.col("stat.graph_key").cast(pl.String)
    return events.with_columns(
        key.str.extract(_DEVICE.pattern).cast(pl.Int64, strict=False).alias("number"),
        pl.lit(None, pl.Int64).alias("payload_bytes"),
    )


def _of_host(plane: Plane) -> pl.DataFrame:
    """Transfers among the events of a host; times are those before the event."""
    columns = {f"stat.{name}" for name in STATS[1:]}
    events = _named(plane)
    if not columns <= set(events.columns):
        return events.head(0).with_columns(
            pl.lit(None, pl.Int64).alias("number"), pl.lit(None, pl.Int64).alias("payload_bytes")
        )

    def number(name: str) -> pl.Expr:
        return pl.col(f"stat.{name}").cast(pl.Int64, strict=False)

    is_send = pl.col("name").str.ends_with("Send")
    device = pl.when(is_send).then(number("dcn_source_per_slice_device_id"))
    dur_ps = number("duration_us") * 1_000_000
    label = pl.col("stat.dcn_label").cast(pl.String).fill_null("")
    return events.filter(pl.col("name").is_in(list(_KINDS))).with_columns(
        device.otherwise(number("dcn_destination_per_slice_device_id")).alias("number"),
        number("payload_size_bytes").alias("payload_bytes"),
        (pl.col("start_ps") - dur_ps).clip(lower_bound=0).alias("start_ps"),
        dur_ps.clip(lower_bound=0).alias("dur_ps"),
        pl.concat_str("name", label, separator=" ").alias("name"),
    )


def _named(plane: Plane) -> pl.DataFrame:
    names = plane.kinds.select("kind", "name")
    return plane.events.join(names, on="kind", how="left", maintain_order="left")


def _placed(events: pl.DataFrame, devices: list[int], base_s: float) -> pl.DataFrame:
    """The events on the devices of their host, which count in the order of the runtime's numbers."""
    numbers = events["number"].drop_nulls().unique().sort().to_list()
    of_number = {n: devices[min(i, len(devices) - 1)] for i, n in enumerate(numbers)}
    kinds = [_kind(name) for name in events["name"]]
    return events.select(
        "name",
        pl.Series("kind", kinds, dtype=pl.String),
        pl.Series("category", [_category(kind) for kind in kinds], dtype=pl.String),
        "payload_bytes",
        pl.col("number")
        .replace_strict(of_number, default=devices[0], return_dtype=pl.Int32)
        .alias("device"),
        (pl.col("start_ps") * PS + base_s).alias("start_s"),
        (pl.col("dur_ps") * PS).alias("dur_s"),
    ).cast(SCHEMA)  # type: ignore[arg-type]


def _kind(name: str | None) -> Kind | None:
    return next((kind for start, kind in _KINDS.items() if (name or "").startswith(start)), None)


def _category(kind: Kind | None) -> str:
    return (Category.COPY if kind is None else Category.COLLECTIVE).value


def transfer_findings(transfers: pl.DataFrame, *, is_counted: bool) -> Iterator[str]:
    """How the transfers count."""
    n = transfers["kind"].drop_nulls().len()
    if not n:
        return
    recorded = f"the Megascale runtime recorded {n:,} transfers between slices"
    if is_counted:
        yield f"{recorded}: they are rows of their own, as the devices recorded no sends"
    else:
        yield f"{recorded}: the sends and receives of the devices count, and the timeline shows both"
