"""Writes a timeline as an XPlane profile, which XProf and TensorBoard open.

Messages are XSpace > XPlane > XLine > XEvent of tsl/profiler/protobuf/xplane.proto. A device has the lines of a TPU
profile: steps, modules (a phase each), operations, and operations that run beside them. XProf takes operations from
the metadata of events, where facts of a row are statistics.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.reports.export.chakra import number, span
from meshscope.reports.export.chrome import Timeline, lanes_of

HOST = "meshscope"
SESSION = Path("plugins", "profile", "meshscope")  # below a log folder, as XProf expects
PS_PER_NS = 1000
_LINES = ("Steps", "XLA Modules", "XLA Ops", "Async XLA Ops")
STEPS, LAYERS = "steps", "layers"  # lanes of a timeline
# Names that XProf knows; others it shows as they are.
_KNOWN = {"kind": "hlo_category", "wire_bytes": "bytes_accessed", "source_line": "source"}


def write_xplane(timeline: Timeline, folder: Path) -> None:
    """Writes `plugins/profile/meshscope/meshscope.xplane.pb` below the folder."""
    session = folder / SESSION
    session.mkdir(parents=True)
    with (session / f"{HOST}.xplane.pb").open("wb") as out:
        for device, rows in sorted(timeline.rows.partition_by("device", as_dict=True).items()):
            out.write(span(1, b"".join(_plane(timeline, int(device[0]), rows))))
        out.write(span(4, HOST))


def _plane(timeline: Timeline, device: int, rows: pl.DataFrame) -> Iterator[bytes]:
    names = defaultdict[str, int](count(1).__next__)  # numbers of the names of statistics
    yield number(1, device + 1) + span(2, f"/device:TPU:{device}")
    for place, (title, lanes) in enumerate(_lines(timeline, rows), start=1):
        for at, lane in enumerate(lanes):
            name = title if not at else f"{title} ({at + 1})"
            yield span(3, number(1, place + 100 * at) + span(2, name) + b"".join(_events(lane)))
    for kind in rows["kind"].unique().sort().to_list():
        name, facts = timeline.kinds[kind]
        known = {_KNOWN.get(str(key), str(key)): value for key, value in facts.items()}
        named = (str(facts[key]) for key in ("phase", "layer", "part") if key in facts)
        if scope := "/".join(named):
            known["tf_op"] = scope
        stats = b"".join(_stat(names, key, value, 5) for key, value in known.items())
        label = str(facts.get("hlo_name") or name)
        metadata = number(1, kind + 1) + span(2, label) + span(4, name) + stats
        yield span(4, number(1, kind + 1) + span(2, metadata))
    yield _stat(names, "device_type_string", timeline.title, 6)
    for name, ident in names.items():
        yield span(5, number(1, ident) + span(2, number(1, ident) + span(2, name)))


def _lines(timeline: Timeline, rows: pl.DataFrame) -> Iterator[tuple[str, list[pl.DataFrame]]]:
    is_async = [kind for kind, (_, facts) in enumerate(timeline.kinds) if facts.get("is_async")]
    of_phase, of_layer = pl.col("lane") == STEPS, pl.col("lane") == LAYERS
    beside = pl.col("kind").is_in(is_async) | pl.col("lane").str.starts_with("copies")
    operations = rows.filter(~of_phase, ~of_layer)
    phases = rows.filter(of_phase)
    tables = (phases, phases, operations.filter(~beside), operations.filter(beside))
    for title, table in zip(_LINES, tables, strict=True):
        yield title, lanes_of(table.sort("start_ns", maintain_order=True)) if len(table) else []


def _events(lane: pl.DataFrame) -> Iterator[bytes]:
    for kind, start_ns, dur_ns in lane.select("kind", "start_ns", "dur_ns").iter_rows():
        times = number(2, start_ns * PS_PER_NS) + number(3, dur_ns * PS_PER_NS)
        yield span(4, number(1, kind + 1) + times)


def _stat(names: dict[str, int], name: str, value: Any, field: int) -> bytes:
    is_number = isinstance(value, int) and value >= 0
    content = number(3, int(value)) if is_number else span(5, str(value))
    return span(field, number(1, names[name]) + content)
