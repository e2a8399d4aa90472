"""`meshscope sql`: DuckDB over the tables of runs, sandboxed: a query reads these views and nothing else.

All views have a column `run`, the name of the run's folder.
"""

import csv
import json
import math
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.analysis.timeline import TIMELINE_SCHEMA, has_executions, read_timeline, sql_columns
from meshscope.api.console import Shown
from meshscope.api.options import option
from meshscope.errors import RunError, SpecError
from meshscope.events.schema import schema_of
from meshscope.events.timeline import DISTINCT_OPS, EXECUTIONS
from meshscope.files import path_of
from meshscope.reports.model import plain
from meshscope.reports.sweep import Row, experiment_values, summary_frame, summary_row
from meshscope.reports.tables import add_column, fits_console, new_table
from meshscope.store.folder import is_run, scratch_folder
from meshscope.store.read import read_events, read_manifest, read_run
from meshscope.workers import signals_handled

MAX_RUNS = 10_000  # in one query; their tables are read into memory
_BATCH_ROWS = 10_000
MAX_ROWS = 9  # that an answer has room for
MAX_FULL_ROWS = 10_000  # of a table for people; files of values have no limit
MAX_COUNTED = 100_000  # rows that are fetched to count them

# Statements that change neither tables nor settings.
_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)

_MODELED = "modeled_timeline"  # without the executions of traces

_LOCKDOWN = (
    "SET python_enable_replacements = false",  # else SQL reads variables of this program
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)

VIEWS = ("events", "collectives", "runs", "summary", "timeline")


def run_folders(pattern: str | Path) -> list[Path]:
    """The runs at this path: a run, a folder of runs, or those that a glob matches; sorted by path.

    RunError if there is none. Other folders are skipped; damaged runs are included, and reading one
    raises its error.
    """
    path = path_of(pattern)
    if is_run(path) or path.is_file():
        return [path]
    entries = sorted(path.iterdir()) if path.is_dir() else sorted(_glob(str(pattern)))
    runs = [folder for folder in entries if is_run(folder) and not folder.name.startswith(".")]
    is_hidden = any(entry.name.startswith(".") for entry in entries)
    if not runs and path.is_dir() and not is_hidden:
        read_manifest(path)  # raises the error that fits the folder
    if not runs:
        raise RunError(
            f"no run at '{pattern}'. Give the folder of a run, or a pattern such as 'runs/*'."
        )
    if len(runs) > MAX_RUNS:
        raise RunError(
            f"'{pattern}' matches {len(runs):,} runs; at most {MAX_RUNS:,} can be read together. Narrow it."
        )
    return runs


def _glob(pattern: str) -> Iterator[Path]:
    path = Path(pattern)
    relative = str(path.relative_to(path.anchor)) if path.is_absolute() else pattern
    try:
        yield from Path(path.anchor).glob(relative)
    except (ValueError, NotImplementedError) as error:
        raise RunError(f"'{pattern}' is not a path pattern: {error}.") from error


def runs_table(folders: Sequence[Path]) -> pl.DataFrame:
    """A row for each run, from its manifest."""
    schema, rows = schema_of("runs"), list[Row]()
    for name, folder in named(folders):
        manifest = read_manifest(folder)
        chip = manifest.experiment.chip
        values = experiment_values(manifest) | {
            "run": name,
            "path": str(folder),
            "created": manifest.created,
            "chip": None if chip is None else chip.name,
            "versions": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
        }
        rows.append({column: values.get(column) for column in schema})
    return pl.DataFrame(rows, schema=schema)


def named(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """Each run by its folder's name, or by its path if two folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    return [
        (name if names.count(name) == 1 else str(folder), folder)
        for name, folder in zip(names, folders, strict=True)
    ]


def events_table(folders: Sequence[Path]) -> pl.DataFrame:
    """The event tables of all runs, with the run's name as the last column."""
    return pl.concat(_with_run(read_events(folder), name) for name, folder in named(folders))


def timeline_table(folders: Sequence[Path]) -> pl.DataFrame:
    """The timelines of the runs that have one; a long trace has only its last steps here."""
    empty = _with_run(pl.DataFrame(schema=TIMELINE_SCHEMA), "")
    tables = [
        _with_run(timeline, name)
        for name, folder in named(folders)
        if (timeline := read_timeline(folder, read_events(folder))) is not None
    ]
    return pl.concat([empty, *tables])


def _with_run(table: pl.DataFrame, name: str) -> pl.DataFrame:
    return table.with_columns(pl.lit(name, pl.String).alias("run"))


@contextmanager
def database(folders: Sequence[Path]) -> Generator[duckdb.DuckDBPyConnection]:
    """A connection that reads the views of these runs and nothing else; SpecError for SQL errors."""
    names = {folder: name for name, folder in named(folders)}
    traces = {names[folder]: folder for folder in folders if has_executions(folder)}
    summary = [summary_row(name, read_run(folder)) for folder, name in names.items()]
    modeled = [folder for folder in folders if names[folder] not in traces]
    tables = {
        "events": events_table(folders),
        "runs": runs_table(folders),
        "summary": summary_frame(summary),
        _MODELED if traces else "timeline": timeline_table(modeled),
    }
    try:
        with duckdb.connect(":memory:") as connection:
            with scratch_folder() as scratch:  # other ways to create tables need pyarrow or pandas
                for name, table in tables.items():
                    path = scratch / f"{name}.parquet"
                    table.write_parquet(path)
                    connection.read_parquet(str(path)).create(name)
            if traces:
                _add_traces(connection, traces)
            connection.execute(
                "create view collectives as select * from events where kind is not null"
            )
            for setting in _LOCKDOWN:
                connection.execute(setting)
            yield connection
    except duckdb.CatalogException as error:
        reason = str(error)
        if "Table with name" in reason:  # DuckDB suggests tables of the system
            reason = f"{reason.partition(chr(10))[0]} Views: {', '.join(VIEWS)}."
        raise SpecError(f"SQL: {reason}") from error
    except duckdb.Error as error:
        raise SpecError(f"SQL: {error}") from error
    except RuntimeError as error:
        if "interrupted" in str(error):  # how DuckDB reports Ctrl-C
            raise KeyboardInterrupt from error
        raise


def _add_traces(connection: duckdb.DuckDBPyConnection, traces: Mapping[str, Path]) -> None:
    """Adds every execution of imported traces to `timeline`; their facts stay in a separate table."""
    for table, file in (("trace_executions", EXECUTIONS), ("trace_ops", DISTINCT_OPS)):
        for index, (name, folder) in enumerate(traces.items()):
            connection.read_parquet(str(folder / file)).create_view("one_trace")
            verb = f"insert into {table}" if index else f"create table {table} as"
            connection.execute(f"{verb} select *, $run as run from one_trace", {"run": name})  # noqa: S608  names above
            connection.execute("drop view one_trace")
    connection.execute(
        f"create view timeline as select * from {_MODELED} union all by name "  # noqa: S608  names above
        f"select {sql_columns(TIMELINE_SCHEMA)} from trace_executions e "
        "join trace_ops o on e.run = o.run and e.op = o.op"
    )


def answer(
    connection: duckdb.DuckDBPyConnection, query: str, most: int | None = None
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Unique column names and the rows, up to the limit; SpecError for anything but one reading query."""
    given: Any = query
    if not isinstance(given, str):
        raise SpecError(
            f"SQL: a query is text, not {given!r}. Give one query that reads, such as a select."
        )
    statements = connection.extract_statements(query)
    if len(statements) != 1 or statements[0].type not in _READING:
        raise SpecError("SQL: give one query that reads, such as a select.")
    rows: list[tuple[Any, ...]] = []
    result = connection.execute(statements[0])
    while batch := result.fetchmany(_BATCH_ROWS):  # Ctrl-C takes effect between batches
        rows += batch
        if most is not None and len(rows) > most:
            break
    return unique([str(column[0]) for column in result.description or []]), rows


def unique(names: Sequence[str]) -> list[str]:
    """The names, a repeated one with a number: a, a_2."""
    return [
        name if name not in names[:i] else f"{name}_{names[:i].count(name) + 1}"
        for i, name in enumerate(names)
    ]


def command(
    *,
    run: str = option("RUN: A run, a folder of runs, or a pattern: 'runs/*'.", kw_only=False),
    query: str = option('QUERY: Such as "select * from collectives".', kw_only=False),
    as_csv: bool = option("Print comma-separated values.", default=False, flags=("--csv",)),
) -> Shown:
    """Query the tables of one run or several with SQL.

    Views: `events` has all rows, `collectives` those with a kind, `timeline` single executions of runs
    with times, `runs` and `summary` a row for each run, `summary` with times, rates and memory; the
    column `run` joins them. `describe events` lists columns; docs/data.md has examples. Rows that do not
    fit the width are printed one value per line.
    """
    folders = run_folders(run)
    # At once, as DuckDB does not check for signals in all of its operators.
    ending = dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_DFL)

    def answered(most: int | None = None) -> tuple[list[str], list[tuple[Any, ...]]]:
        with database(folders) as connection, signals_handled(ending):
            return answer(connection, query, most)

    def document() -> list[dict[str, Any]]:
        names, rows = answered()
        return [dict(zip(names, map(_json_value, row), strict=True)) for row in rows]

    def comma_separated(_: Console) -> Iterator[str]:
        names, rows = answered()
        lines = StringIO()
        cells = ([_cell(value, "") for value in row] for row in rows)
        csv.writer(lines, lineterminator="\n").writerows([names, *cells])
        yield lines.getvalue().removesuffix("\n")

    def shown(console: Console, most: int = MAX_ROWS) -> Iterator[RenderableType]:
        return _table(*answered(MAX_COUNTED), console, most=most)

    if as_csv:
        return Shown(document, comma_separated, chosen="--csv")
    return Shown(document, shown, partial(shown, most=MAX_FULL_ROWS))


def _table(
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    console: Console,
    *,
    most: int,
) -> Iterator[RenderableType]:
    """A table, or records where it does not fit the console; of more rows than `most`, how many there are."""
    table, shown = new_table(), rows[:most]
    for i, name in enumerate(names):
        add_column(table, name, is_figure=any(isinstance(row[i], int | float) for row in shown))
    for row in shown:
        table.add_row(*(Text(_plain_lines(value)) for value in row))
    if not rows or fits_console(table, console):
        yield table
    else:
        for number, row in enumerate(shown, start=1):
            yield Text(f"row {number}", "bold")
            grid = Table.grid(padding=(0, 2, 0, 0))
            for name, value in zip(names, row, strict=True):
                grid.add_row(Text(plain(name)), Text(_plain_lines(value), overflow="fold"))
            yield grid
    if len(shown) < len(rows):
        n_rows = f"{MAX_COUNTED:,} or more" if len(rows) > MAX_COUNTED else f"{len(rows):,}"
        more = "--full, --csv" if len(rows) <= MAX_FULL_ROWS else "--csv"
        yield Text(f"{len(shown):,} of {n_rows} rows; {more} or --json for all")


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
