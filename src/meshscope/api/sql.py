"""`meshscope sql`: sandboxed DuckDB over the tables of runs."""

import csv
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.api.console import new_console, note, print_all, print_json
from meshscope.api.database import answer, database, run_folders
from meshscope.api.options import JsonOutput, option
from meshscope.errors import UsageError
from meshscope.reports.model import plain
from meshscope.reports.tables import MAX_WIDTH, add_column, fits_console, new_table

MAX_ROWS = 100  # in a table, unless --rows names more
MAX_RECORDS = 10
MAX_COUNTED = 100_000  # rows beyond those in a table that are fetched to count them
GRACE_S = 2.0  # for an interrupted query to end


def command(
    *,
    run: str = option("RUN: A run, a folder of runs, or a pattern: 'runs/*'.", kw_only=False),
    query: str = option('QUERY: Such as "select * from collectives".', kw_only=False),
    as_csv: bool = option("Print comma-separated values.", default=False, flags=("--csv",)),
    is_wide: bool = option(
        "Print a table even if it is wider than the terminal.", default=False, flags=("--wide",)
    ),
    n_rows: int | None = option(
        "N: Rows to print as text.",
        default=None,
        least=1,
        shown=f"{MAX_ROWS}, or {MAX_RECORDS} where rows do not fit the width",
        flags=("--rows",),
    ),
    output: JsonOutput,
) -> None:
    """Query the tables of one run or several with SQL.

    Views: `events` has all rows, `collectives` those with a kind, `timeline` single executions of runs
    with times, `runs` and `summary` a row for each run, `summary` with times, rates and memory; the
    column `run` joins them. `describe events` lists columns; docs/data.md has examples. Rows that do not
    fit the width are printed one value per line.
    """
    if output.as_json and as_csv:
        raise UsageError("give one of --json and --csv")
    is_whole = output.as_json or as_csv
    most = None if is_whole else (n_rows or MAX_ROWS) + MAX_COUNTED
    with database(run_folders(run)) as connection, _ended_by_signal():
        names, rows = answer(connection, query, most)
    if output.as_json:
        print_json([dict(zip(names, map(_json_value, row), strict=True)) for row in rows])
    elif as_csv:
        cells = ([_cell(value, "") for value in row] for row in rows)
        csv.writer(sys.stdout, lineterminator="\n").writerows([names, *cells])
    else:
        _print_text(names, rows, n_rows, is_wide=is_wide)


def _print_text(
    names: Sequence[str], rows: Sequence[Sequence[Any]], n_rows: int | None, *, is_wide: bool
) -> None:
    """Prints a table, or records where it does not fit the console; notes how many rows are left."""
    console, table = new_console(), new_table()
    tabled = rows[: n_rows or MAX_ROWS]
    for i, name in enumerate(names):
        add_column(table, name, is_figure=any(isinstance(row[i], int | float) for row in tabled))
    for row in tabled:
        table.add_row(*(Text(_plain_lines(value)) for value in row))
    if is_wide:
        console.width = MAX_WIDTH
    is_table = is_wide or not rows or fits_console(table, console)
    n_shown = min(len(rows), n_rows or (MAX_ROWS if is_table else MAX_RECORDS))
    print_all(console, [table] if is_table else _records(names, rows[:n_shown]))
    if n_shown < len(rows):
        more = "" if is_table else ", fewer columns or --wide for a table"
        n_rows_text = f"{MAX_COUNTED:,} or more" if len(rows) > MAX_COUNTED else f"{len(rows):,}"
        note(f"{n_shown} of {n_rows_text} rows; --rows N for more{more}, --csv or --json for all.")


def _records(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[RenderableType]:
    for number, row in enumerate(rows, start=1):
        yield Text(f"row {number}", "bold")
        grid = Table.grid(padding=(0, 2, 0, 0))
        for name, value in zip(names, row, strict=True):
            grid.add_row(Text(plain(name)), Text(_plain_lines(value), overflow="fold"))
        yield grid


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


def _cell(value: Any, null: str) -> str:
    if isinstance(value, list | tuple | dict):
        return json.dumps(_json_value(value), separators=(",", ":"))
    return null if value is None else str(value)


def _plain_lines(value: Any) -> str:
    """Printable text that keeps its line breaks, for query plans."""
    return "\n".join(plain(line) for line in _cell(value, "null").split("\n"))
