"""The findings of docs/evidence/study.md: each is a sentence, the query behind it, and what must be true of its rows.

For cog: `finding` prints a sentence with the numbers of its query, `queries` every query. A finding whose
query no longer supports it ends with an error, so the page cannot say what the data do not.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb
import yaml

from meshscope.serving.prices import parse_prices
from meshscope.units import format_bytes, format_seconds

DOCS = Path(__file__).parent
DATA = DOCS / "evidence" / "study"
TABLES = ("points", "collectives", "classes", "programs", "operations")
HOLDS = "holds"  # the column that must be true in every row


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A finding; `text` has the columns of the first row in braces, `table` the headers of shown columns."""

    name: str
    text: str
    sql: str
    table: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Shown:
    """A value of a row that formats as `time`, `bytes` or `times` (2.1 x), too."""

    value: Any

    def __format__(self, form: str) -> str:
        """The value in the unit that `form` names, else by its own rules."""
        match form:
            case "time":
                return format_seconds(self.value)
            case "bytes":
                return format_bytes(self.value)
            case "times":
                return f"{self.value:.2g} x"
            case _:
                return format(self.value, form)


@cache
def claims() -> Mapping[str, Claim]:
    """The claims of claims.yaml, by name."""
    listed = yaml.safe_load((DATA / "claims.yaml").read_text(encoding="utf-8"))
    read = [Claim(table=one.pop("table", {}), **one) for one in listed]
    return {one.name: one for one in read}


@cache
def database() -> duckdb.DuckDBPyConnection:
    """The dataset as views: its tables, `torchxla` for docs/evidence/torchxla/compared.csv, and list `prices` of chips."""
    connection = duckdb.connect()
    for table in TABLES:
        connection.execute(f"create view {table} as from '{DATA / table}.parquet'")
    connection.execute(
        f"create view torchxla as from read_csv('{DOCS / 'evidence' / 'torchxla' / 'compared.csv'}')"
    )
    connection.execute("create table prices (chip varchar, dollars double)")
    rows = list(parse_prices("list").items())
    connection.executemany("insert into prices values (?, ?)", rows)
    return connection


def rows_of(claim: Claim) -> list[dict[str, Any]]:
    """The rows of the query; SystemExit if there are none, or if one contradicts the claim."""
    cursor = database().execute(claim.sql)
    names = [column[0] for column in cursor.description or ()]
    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    if not rows:
        raise SystemExit(f"'{claim.name}': the query has no rows.")
    against = [row for row in rows if not row[HOLDS]]
    if against:
        raise SystemExit(f"'{claim.name}': these rows contradict it: {against[:3]}")
    return rows


def finding(name: str) -> None:
    """Prints the sentence with a link to its query, and its table."""
    claim = claims()[name]
    rows = rows_of(claim)
    values = {key: Shown(value) for key, value in rows[0].items()}
    sys.stdout.write(
        f"{claim.text.strip().format_map(values)} ([query](study-queries.md#{name}))\n"
    )
    if claim.table:
        sys.stdout.write("\n")
        _print_table(
            list(claim.table.values()), [[_cell(k, row[k]) for k in claim.table] for row in rows]
        )


def queries() -> None:
    """Prints every query under the name of its finding."""
    for claim in claims().values():
        sys.stdout.write(f"## {claim.name}\n\n```sql\n{claim.sql.strip()}\n```\n\n")


UNITS: Mapping[str, Callable[[Any], str]] = {
    "s": format_seconds,
    "bytes": format_bytes,
    "frac": "{:.0%}".format,
    "x": "{:.2f}".format,
}


def _cell(name: str, value: Any) -> str:
    """A value in the unit that the name of its column ends with."""
    unit = name.rpartition("_")[2]
    if value is None:
        text = ""
    elif unit in UNITS:
        text = UNITS[unit](value)
    elif name.startswith("plan"):
        text = f"`{value}`"
    elif name == "model":
        text = str(value).rpartition("/")[2]
    elif isinstance(value, float):
        text = f"{value:,.3g}"
    else:
        text = f"{value:,}" if isinstance(value, int) else str(value)
    return text


def _print_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    for cells in (head, ["---"] * len(head), *lines):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


def columns() -> None:
    """Prints the columns of every table of the dataset."""
    sys.path.insert(0, str(DOCS.parent / "experiments"))
    study, compiled = import_module("study"), import_module("study_compiled")
    classes = import_module("study_classes")
    tables = {
        "points": study.POINT_COLUMNS,
        "collectives": study.COLLECTIVE_COLUMNS,
        "classes": classes.COLUMNS,
        "programs": compiled.PROGRAM_COLUMNS,
        "operations": compiled.OPERATION_COLUMNS,
    }
    for table, described in tables.items():
        (n_rows,) = database().execute(f"select count(*) from {table}").fetchall()[0]
        sys.stdout.write(f"## {table}\n\n{n_rows:,} rows.\n\n")
        lines = [[f"`{name}`", unit, meaning] for name, (_, unit, meaning) in described.items()]
        _print_table(["column", "unit", "meaning"], lines)
        sys.stdout.write("\n")
