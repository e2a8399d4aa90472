"""Schema of the event table: type, unit and meaning of every column.

Compute, copies and idle spans are rows of the same table with null collective columns.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from meshscope.errors import RunError
from meshscope.events.collective import Collective

SCHEMA_VERSION = 1


class Column(NamedTuple):
    """A column of the event table."""

    name: str
    dtype: Any  # a polars data type
    unit: str
    meaning: str


_TYPES = {
    "Int32": pl.Int32,
    "Int64": pl.Int64,
    "Float64": pl.Float64,
    "String": pl.String,
    "Boolean": pl.Boolean,
    "List(Int64)": pl.List(pl.Int64),
    "List(List(Int32))": pl.List(pl.List(pl.Int32)),
}
_STORED = tomllib.loads(Path(__file__).with_name("schema.toml").read_text(encoding="utf-8"))
COLUMNS = tuple(
    Column(name, _TYPES[dtype], unit, meaning) for name, (dtype, unit, meaning) in _STORED.items()
)

POLARS_SCHEMA: dict[str, Any] = {c.name: c.dtype for c in COLUMNS}


def table_of(rows: Iterable[Collective]) -> pl.DataFrame:
    """The collectives as an event table with all columns in schema order; they have no device."""
    listed = list(rows)
    columns = {name: [getattr(row, name, None) for row in listed] for name in POLARS_SCHEMA}
    columns["wire_bytes"] = [None if b is None else float(b) for b in columns["wire_bytes"]]
    return pl.DataFrame(columns, schema=POLARS_SCHEMA)


def checked_table(frame: pl.DataFrame, origin: str) -> pl.DataFrame:
    """Return `frame` if it has exactly this schema, else raise RunError.

    The parallelism of a table of an older version is null.
    """
    if "parallelism" not in frame.columns:
        frame = frame.with_columns(pl.lit(None, pl.String).alias("parallelism"))
    if dict(frame.schema) != dict(pl.Schema(POLARS_SCHEMA)):
        missing = sorted(set(POLARS_SCHEMA) - set(frame.columns))
        unknown = sorted(set(frame.columns) - set(POLARS_SCHEMA))
        raise RunError(
            f"{origin}: not an event table of schema {SCHEMA_VERSION} "
            f"(missing columns {missing}, unknown columns {unknown}). "
            "Rebuild the run with the command in its manifest.json, with --force."
        )
    return frame.select(*POLARS_SCHEMA)
