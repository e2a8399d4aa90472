"""CSV and Parquet contain the event table, and no spreadsheet formulas."""

import csv
import json
import sys
from pathlib import Path

import polars as pl

from meshscope.events.schema import POLARS_SCHEMA, table_of
from meshscope.reports.export.files import write_csv, write_parquet


def rows_of(path: Path) -> list[dict[str, str]]:
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    finally:
        csv.field_size_limit(limit)  # of the whole process: other tests rely on it


def test_parquet_is_the_table(make_run, tmp_path: Path) -> None:
    run = make_run()
    write_parquet(run, tmp_path / "t.parquet")
    assert pl.read_parquet(tmp_path / "t.parquet").equals(table_of(run.rows))


def test_csv_has_every_row_and_column(make_run, tmp_path: Path) -> None:
    run = make_run()
    write_csv(run, tmp_path / "t.csv")
    rows = rows_of(tmp_path / "t.csv")
    assert len(rows) == len(run.rows)
    assert list(rows[0]) == list(POLARS_SCHEMA)
    assert json.loads(rows[0]["groups"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [float(r["wire_bytes"]) for r in rows] == [float(r.wire_bytes) for r in run.rows]
    assert {r["dur_s"] for r in rows} == {""}


def test_hostile_texts_are_cut_and_start_no_formula(hostile_run, tmp_path: Path) -> None:
    from dataclasses import replace  # noqa: PLC0415

    formula = replace(
        hostile_run.rows[0], hlo_name='=HYPERLINK("http://x")', axis="@x", dtype="-1+1"
    )
    write_csv(replace(hostile_run, rows=(formula, *hostile_run.rows)), tmp_path / "t.csv")
    rows = rows_of(tmp_path / "t.csv")
    assert len(rows) == len(hostile_run.rows) + 1
    assert (rows[0]["hlo_name"][:2], rows[0]["axis"], rows[0]["dtype"]) == ("'=", "'@x", "'-1+1")
    assert max(len(value) for row in rows for value in row.values()) < 2_100
    assert not {"\x00", "\x1b", "\n"} & set(rows[1]["hlo_name"])
