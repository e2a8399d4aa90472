"""Timelines of measured runs: every device has its times, and flows join the devices."""

import json
from dataclasses import replace
from pathlib import Path

import polars as pl

from meshscope.analysis.timeline import OPS
from meshscope.events.enums import Source
from meshscope.events.schema import POLARS_SCHEMA
from meshscope.reports.export.chrome import write_chrome
from meshscope.reports.export.timeline import run_timeline, timeline_of
from meshscope.store.read import read_run
from meshscope.store.write import write_run


def ops_of(run) -> pl.DataFrame:
    """Every row of the run on each device in one step; device d starts d microseconds late."""
    records = []
    for row in run.rows:
        for device in range(8):
            record = {name: getattr(row, name, None) for name in POLARS_SCHEMA}
            record |= {
                "groups": [list(group) for group in row.groups], "n_groups": row.n_groups,
                "wire_bytes": float(row.wire_bytes), "shape": list(row.shape), "device": device,
                "start_s": (10 * (len(records) // 8) + device) * 1e-6, "dur_s": 5e-6,
                "time_basis": "measured", "hlo_name": f"psum.{len(records) // 8}", "step": 4,
            }  # fmt: skip
            records.append(record)
    return pl.DataFrame(records, schema={**POLARS_SCHEMA, "step": pl.Int64})


def test_every_device_has_its_own_times(make_run, tmp_path: Path) -> None:
    predicted = make_run()
    rows = tuple(replace(row, source=Source.MEASURED) for row in predicted.rows)
    manifest = replace(predicted.manifest, source=Source.MEASURED)
    run = replace(predicted, rows=rows, manifest=manifest)
    (tmp_path / "trace").mkdir()
    ops_of(run).write_parquet(tmp_path / OPS)
    write_run(tmp_path, run, metrics={})
    layout = run_timeline(read_run(tmp_path))
    assert layout.is_time
    first = [next(e for e in layout.of_device(d) if e.kind) for d in range(8)]
    assert [e.start_ns for e in first] == [1000 * d for d in range(8)]
    assert {e.collective_id for e in first} == {first[0].collective_id}
    path = tmp_path / "t.json"
    write_chrome(timeline_of(layout), path, is_gzipped=False)
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" and "kind" in e["args"] for e in events) == 8 * len(rows)
    assert sum(e["ph"] == "s" for e in events) == 2 * len(rows)
