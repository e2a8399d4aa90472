"""`meshscope sql`: DuckDB over the event table of a run, with no way out of it."""

import csv
import json
import math
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import duckdb
import typer
from rich.table import Table
from rich.text import Text

from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.errors import SpecError
from meshscope.report.plain import plain
from meshscope.report.tables import add_column, new_table
from meshscope.rundir.read import read_manifest
from meshscope.rundir.write import EVENTS
from meshscope.sweep.folder import MARK, SUMMARY, runs_in

# What a query may be; nothing here changes a table or the settings.
_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)

_LOCKDOWN = (
    "SET python_enable_replacements = false",  # else SQL sees the variables of this program
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or a sweep.")],
    query: Annotated[str, typer.Argument(metavar="QUERY", help='e.g. "select * from collectives"')],
    *,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Query the event table of a run or a sweep with SQL.

    Views: `events` has every row, `collectives` those with a kind. Their columns are in
    `describe events`. Of a sweep, both have a column `run`, and `runs` has a row for each.
    """
    if as_json and as_csv:
        raise typer.BadParameter("give one of --json and --csv")
    names, rows = _query(run, query)
    if as_json:
        print_json([dict(zip(names, map(_json_value, row), strict=True)) for row in rows])
    elif as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([names, *map(_csv_row, rows)])
    else:
        print_all(new_console(), [_table(names, rows)])


def _query(run: Path, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of the answer."""
    is_sweep = (run / MARK).is_file()
    runs = runs_in(run) if is_sweep else [run]
    for one in runs:
        read_manifest(one)
    try:
        with duckdb.connect(":memory:") as connection:
            if is_sweep:
                _create_sweep(connection, run, runs)
            else:
                connection.read_parquet(str(run / EVENTS)).create("events")
            connection.execute(
                "create view collectives as select * from events where kind is not null"
            )
            for setting in _LOCKDOWN:
                connection.execute(setting)
            return _answer(connection, query)
    except duckdb.Error as error:
        raise SpecError(f"SQL: {error}") from error


def _create_sweep(connection: duckdb.DuckDBPyConnection, sweep: Path, runs: Sequence[Path]) -> None:
    """`runs`, and the events of all runs with the name of their run."""
    connection.read_parquet(str(sweep / SUMMARY)).create("runs")
    for number, run in enumerate(runs):
        events = connection.read_parquet(str(run / EVENTS))
        named = events.project(f"{_quoted(run.name)} as run, *")
        if number:
            named.insert_into("events")
        else:
            named.create("events")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _answer(
    connection: duckdb.DuckDBPyConnection, query: str
) -> tuple[list[str], list[tuple[Any, ...]]]:
    statements = connection.extract_statements(query)
    if len(statements) != 1 or statements[0].type not in _READING:
        raise SpecError("SQL: give one query that reads, such as a select.")
    result = connection.execute(statements[0])
    names = _unique([str(column[0]) for column in result.description or []])
    return names, result.fetchall()


def _unique(names: Sequence[str]) -> list[str]:
    """The names, a repeated one with its number: a, a_2."""
    return [
        name if name not in names[:i] else f"{name}_{names[:i].count(name) + 1}"
        for i, name in enumerate(names)
    ]


def _json_value(value: Any) -> Any:
    """The value as JSON has it; what JSON has no form for becomes text, not a number null."""
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _csv_row(row: Sequence[Any]) -> list[str]:
    return ["" if value is None else _cell(value) for value in row]


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return json.dumps(_json_value(value), separators=(",", ":"))
    return str(value)


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = new_table()
    for i, name in enumerate(names):
        is_figure = any(isinstance(row[i], int | float) for row in rows)
        add_column(table, name, is_figure=is_figure)
    for row in rows:
        table.add_row(*(Text("null" if v is None else _plain_lines(_cell(v))) for v in row))
    return table


def _plain_lines(text: str) -> str:
    """Plain text that keeps its lines, which a query plan has."""
    return "\n".join(plain(line) for line in text.split("\n"))
