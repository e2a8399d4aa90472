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
    (row,) = overlap(modeled_timeline(folded(*rows), events())).iter_rows(named=True)
    assert (row["compute_s"], row["exposed_s"], row["hidden_s"]) == (4, 3, 0)
    assert row["step_s"] == pytest.approx(8)
    assert row["idle_s"] == pytest.approx(1)


def test_measured_steps_are_numbered_and_averaged(tmp_path: Path) -> None:
    """Two decode steps of one device, 10 and 20 s long; what no step holds is left out."""
    rows = [
        (7, 0.0, 4.0, None),
        (7, 4.0, 6.0, "all_reduce"),
        (9, 50.0, 20.0, None),
        (None, 30.0, 5.0, None),
    ]
    measured = pl.DataFrame(
        [
            {
                **dict.fromkeys(POLARS_SCHEMA), "source": "measured", "phase": "decode", "device": 3,
                "opcode": "all-reduce" if kind else "fusion", "kind": kind, "axis": "tp" if kind else None,
                "start_s": start, "dur_s": dur, "step": step, "host": 0,
            }
            for step, start, dur, kind in rows
        ],
        schema={**POLARS_SCHEMA, "step": pl.Int64, "host": pl.UInt16},
    )  # fmt: skip
    (tmp_path / "trace").mkdir()
    measured.write_parquet(tmp_path / OPS)
    table = read_timeline(tmp_path, events())
    assert table["step"].to_list() == [0, 0, 1]
    (row,) = overlap(table).iter_rows(named=True)
    assert (row["device"], row["n_steps_seen"]) == (3, 2)
    assert (row["step_s"], row["compute_s"], row["exposed_s"]) == (15, 12, 3)
    assert exposed_by(table)["exposed_s"].to_list() == [3]
    assert last_step(table)["start_s"].to_list() == [50]


def test_a_measured_row_knows_how_many_steps_the_request_has(tmp_path: Path) -> None:
    ops = pl.DataFrame(
        [
            {
                **dict.fromkeys(POLARS_SCHEMA), "source": source, "phase": "decode", "n_steps": 1,
                "start_s": 0.0, "dur_s": 1.0, "step": 4,
            }
            for source in ("measured", "compiled")
        ],
        schema={**POLARS_SCHEMA, "step": pl.Int64},
    )  # fmt: skip
    (tmp_path / "trace").mkdir()
    ops.write_parquet(tmp_path / OPS)
    measured_events = events().with_columns(
        pl.lit("measured").alias("source"), pl.lit("decode").alias("phase")
    )
    table = read_timeline(tmp_path, measured_events)
    assert table["n_steps"].to_list() == [9, 1]


def test_a_run_without_timeline_has_none(tmp_path: Path) -> None:
    assert read_timeline(tmp_path, events()) is None
