"""`meshscope sql`: sandboxed DuckDB over the tables of runs."""

import csv
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from meshscope.api.database import answer, database, run_folders
from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.views.plain import plain
from meshscope.views.tables import add_column, new_table

GRACE_S = 2.0  # for an interrupted query to end


def command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run, a folder of runs, or a pattern: 'runs/*'.")
    ],
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help='Such as "select * from collectives".')
    ],
    *,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Query the tables of one run or several with SQL.

    Views: `events` has all rows, `collectives` those with a kind, `timeline` single executions of runs
    with times, `runs` a row for each run; the column `run` joins them. `describe events` lists columns;
    docs/sql.md has examples.
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


def _query(runs: str, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of the result."""
    with database(run_folders(runs)) as connection, _ended_by_signal():
        return answer(connection, query)


@contextmanager
def _ended_by_signal() -> Generator[None]:
    """Ends the process if the block goes on for GRACE_S after Ctrl-C or SIGTERM.

    DuckDB does not check for signals in all of its operators.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    is_done = threading.Event()

    def watch() -> None:
        number = os.read(read_end, 1)
        if number and not is_done.wait(GRACE_S):
            os._exit(128 + number[0])
        os.close(read_end)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_done.set()
        signal.set_wakeup_fd(previous)
        os.close(write_end)


def _json_value(value: Any) -> Any:
    """The value as JSON: text for types that JSON lacks, null for a number that is not finite."""
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
    """Printable text that keeps its line breaks, for query plans."""
    return "\n".join(plain(line) for line in text.split("\n"))
