"""Schema of the event table: type, unit and meaning of every column; types of the columns of other tables.

Compute, copies and idle spans are rows of the same table with null collective columns.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import polars as pl

from meshscope.errors import RunError
from meshscope.events.collective import Collective
from meshscope.files import own_table

SCHEMA_VERSION = 1


class Column(NamedTuple):
    """A column of the event table."""

    name: str
    dtype: Any  # a polars data type
    unit: str
    meaning: str


def _polars_type(text: str) -> Any:
    name, _, of_items = text.partition("(")
    if name == "Enum":
        return pl.Enum(of_items[:-1].split())
    return pl.List(_polars_type(of_items[:-1])) if of_items else getattr(pl, name)


_STORED = own_table("events/schema.toml")
COLUMNS = tuple(
    Column(name, _polars_type(dtype), unit, meaning)
    for name, (dtype, unit, meaning) in _STORED["events"].items()
)

POLARS_SCHEMA: dict[str, Any] = {c.name: c.dtype for c in COLUMNS}


def schema_of(table: str) -> dict[str, Any]:
    """The columns of another table of `schema.toml`."""
    columns = _STORED[table].items()
    return {n: _polars_type(dtype) if dtype else POLARS_SCHEMA[n] for n, dtype in columns}


def in_schema(frame: pl.DataFrame, schema: dict[str, Any]) -> pl.DataFrame:
    """The columns of the schema; null where the table has none."""
    return frame.select(
        (pl.col(name) if name in frame else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in schema.items()
    )


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
