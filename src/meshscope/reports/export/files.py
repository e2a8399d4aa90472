"""Writes the event table as CSV or Parquet."""

import json
from pathlib import Path

import polars as pl

from meshscope.analysis.catalog import events_of
from meshscope.events.timeline import printable
from meshscope.store.run import RunRecord

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a spreadsheet formula


def write_parquet(run: RunRecord, path: Path) -> None:
    """Writes the event table with the types of its schema."""
    events_of(run).write_parquet(path)


def write_csv(run: RunRecord, path: Path) -> None:
    """Writes the event table with lists as JSON and unknown values as empty cells.

    Texts contain no control characters and are cut after 2,000 characters. A text that a
    spreadsheet would read as a formula gets a leading apostrophe.
    """
    events = events_of(run)
    columns = [_cells(events[name]) for name in events.columns]
    pl.DataFrame(columns).write_csv(path)


def _cells(column: pl.Series) -> pl.Series:
    if column.dtype == pl.String:
        return column.map_elements(_guarded, return_dtype=pl.String)
    if isinstance(column.dtype, pl.List):
        texts = [
            None if value is None else json.dumps(value, separators=(",", ":"))
            for value in column.to_list()
        ]
        return pl.Series(column.name, texts, dtype=pl.String)
    return column


def _guarded(text: str) -> str:
    cut = printable(text).replace("\n", " ").replace("\t", " ")
    return f"'{cut}" if cut.startswith(_FORMULA) else cut
