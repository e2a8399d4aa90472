"""The executions of a folded timeline, with the columns of the event table."""

from pathlib import Path

import polars as pl
import pytest
from made import collective

from meshscope.analysis.overlap import exposed_by, overlap
from meshscope.analysis.timeline import (
    OPS,
    TIMELINE_SCHEMA,
    last_step,
    modeled_timeline,
    read_timeline,
)
from meshscope.events.enums import Kind, Phase
from meshscope.events.schema import POLARS_SCHEMA, table_of
from meshscope.events.timeline import FOLDED_SCHEMA


def folded(*rows) -> pl.DataFrame:
    """Rows (lane, kind, start, duration, repeats, periods, name)."""
    return pl.DataFrame(
        [
            {
                **dict.fromkeys(FOLDED_SCHEMA), "source": "compiled", "phase": "decode", "lane": lane,
                "part": "mlp", "kind": kind, "axis": "tp" if kind else None, "start_s": start,
                "dur_s": dur, "repeats": repeats, "periods_s": periods, "time_basis": "x",
                "hlo_name": name, "layers": range(len(repeats) and 3), "exposed_s": dur if kind else None,
            }
            for lane, kind, start, dur, repeats, periods, name in rows
        ],
        schema=FOLDED_SCHEMA,
    )  # fmt: skip


def events() -> pl.DataFrame:
    rows = [
        collective(Kind.ALL_REDUCE, (n,), phase=Phase.DECODE, layer=layer, groups=((0, 1),), n_steps=9)
        for layer in range(3) for n in (8, 2)
    ]  # fmt: skip
    return table_of(rows).with_columns(
        pl.lit("compiled").alias("source"), pl.lit("psum.1").alias("hlo_name")
    )


def test_each_execution_knows_what_its_instruction_sends() -> None:
    """Two arrays of one instruction add up; three layers do not."""
    table = modeled_timeline(
        folded(("collective", "all_reduce", 0.0, 2.0, [3], [5.0], "psum.1")), events()
    )
    assert table.columns == [*POLARS_SCHEMA, "step", "stream", "step_class", "activity"]
    assert table.schema == pl.Schema(TIMELINE_SCHEMA)
    assert table["payload_bytes"].to_list() == [20, 20, 20]
    assert table["start_s"].to_list() == [0, 5, 10]
    assert table["layer"].to_list() == [0, 1, 2]
    assert table["exposed_s"].to_list() == [2, 2, 2]
    assert table["n_steps"].to_list() == [9] * 3


def test_copies_are_no_compute() -> None:
    rows = [
        ("core", None, 0.0, 4.0, [], [], "fusion"),
        ("copy", None, 3.0, 5.0, [], [], "copy-start"),
        ("collective", "all_reduce", 4.0, 3.0, [], [], "psum.1"),
    ]
    shown = overlap(modeled_timeline(folded(*rows), events()))
    columns = ("compute_s", "exposed_s", "hidden_s", "step_s", "idle_s")
    assert shown.select(columns).row(0) == pytest.approx((4, 3, 0, 8, 1))


def written(folder: Path, *rows: dict[str, object]) -> None:
    """Writes operations of decode steps with these columns."""
    blank = {**dict.fromkeys(POLARS_SCHEMA), "phase": "decode"}
    schema = {**POLARS_SCHEMA, "step": pl.Int64, "host": pl.UInt16}
    (folder / "trace").mkdir()
    pl.DataFrame([blank | row for row in rows], schema=schema).write_parquet(folder / OPS)


def test_measured_steps_are_numbered_and_averaged(tmp_path: Path) -> None:
    """Two decode steps of one device, 10 and 20 s long; what no step holds is left out."""
    assert read_timeline(tmp_path, events()) is None  # yet
    known = {"source": "measured", "device": 3, "host": 0}
    work = known | {"opcode": "fusion"}
    sent = known | {"opcode": "all-reduce", "kind": "all_reduce", "axis": "tp"}
    written(
        tmp_path,
        work | {"step": 7, "start_s": 0.0, "dur_s": 4.0},
        sent | {"step": 7, "start_s": 4.0, "dur_s": 6.0},
        work | {"step": 9, "start_s": 50.0, "dur_s": 20.0},
        work | {"step": None, "start_s": 30.0, "dur_s": 5.0},
    )
    table = read_timeline(tmp_path, events())
    assert table["step"].to_list() == [0, 0, 1]
    columns = ("device", "n_steps_seen", "step_s", "compute_s", "exposed_s")
    assert overlap(table).select(columns).rows() == [(3, 2, 15, 12, 3)]
    assert exposed_by(table)["exposed_s"].to_list() == [3]
    assert last_step(table)["start_s"].to_list() == [50]


def test_a_measured_row_knows_how_many_steps_the_request_has(tmp_path: Path) -> None:
    known = {"n_steps": 1, "start_s": 0.0, "dur_s": 1.0, "step": 4}
    written(tmp_path, *(known | {"source": source} for source in ("measured", "compiled")))
    measured_events = events().with_columns(
        pl.lit("measured").alias("source"), pl.lit("decode").alias("phase")
    )
    assert read_timeline(tmp_path, measured_events)["n_steps"].to_list() == [9, 1]
