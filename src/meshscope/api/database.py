"""DuckDB over the tables of runs, sandboxed: a query reads these views and nothing else.

All views have a column `run`, the name of the run's folder.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from meshscope.analysis.timeline import TIMELINE_SCHEMA, has_executions, read_timeline, sql_columns
from meshscope.errors import RunError, SpecError
from meshscope.events.timeline import DISTINCT_OPS, EXECUTIONS
from meshscope.files import path_of
from meshscope.reports.sweep import summary_frame, summary_row
from meshscope.store.folder import is_run, scratch_folder
from meshscope.store.read import read_events, read_manifest, read_run

MAX_RUNS = 10_000  # in one query; their tables are read into memory
_BATCH_ROWS = 10_000

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

_RUNS_SCHEMA: dict[str, Any] = {
    **dict.fromkeys(("run", "path", "source", "model", "plan", "topology", "chip"), pl.String),
    **dict.fromkeys(("n_chips", "n_devices", "n_layers"), pl.Int64),
    **dict.fromkeys(("batch", "prompt", "output"), pl.Int64),
    **dict.fromkeys(("engine", "frontend", "partitioner", "created", "versions"), pl.String),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A view: its name and its contents."""

    name: str
    meaning: str


VIEWS: tuple[View, ...] = (
    View(name="events", meaning="every row of the event table, of every run"),
    View(name="collectives", meaning="the rows of `events` with a kind"),
    View(
        name="runs",
        meaning="a row for each run: source, model, plan, topology, chip, n_chips, n_devices, n_layers, "
        "batch, prompt, output, engine, frontend, partitioner, created, versions",
    ),
    View(
        name="summary",
        meaning="a row for each run that ranks it: ttft_s, tpot_s, decode_tokens_per_s and "
        "request_tokens_per_s, total_bytes and fits of its strongest source, and its totals; the columns "
        "of a sweep's summary.parquet",
    ),
    View(
        name="timeline",
        meaning="a row for each execution of a step, compute and copies among them, with the columns of "
        "`events` and `step`, of runs whose time was modeled from a schedule or measured, and of imported "
        "traces, with `stream` and `step_class`; modeled compute has its `activity`",
    ),
)


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
    if not runs and path.is_dir() and not any(map(_is_hidden, entries)):
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


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _glob(pattern: str) -> Iterator[Path]:
    path = Path(pattern)
    anchor = Path(path.anchor) if path.is_absolute() else Path()
    relative = str(path.relative_to(anchor)) if path.is_absolute() else pattern
    try:
        yield from anchor.glob(relative)
    except (ValueError, NotImplementedError) as error:
        raise RunError(f"'{pattern}' is not a path pattern: {error}.") from error


def runs_table(folders: Sequence[Path]) -> pl.DataFrame:
    """A row for each run, from its manifest."""
    rows = [_run_row(name, folder) for name, folder in named(folders)]
    return pl.DataFrame(rows, schema=_RUNS_SCHEMA)


def summary_view(folders: Sequence[Path]) -> pl.DataFrame:
    """The figures of each run: those of summary.parquet."""
    return summary_frame([summary_row(name, read_run(folder)) for name, folder in named(folders)])


def _run_row(name: str, folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    experiment = manifest.experiment
    workload, program = experiment.workload, experiment.program
    topology, chip = experiment.topology, experiment.chip
    return {
        "run": name,
        "path": str(folder),
        "source": manifest.source.value,
        "model": experiment.model_name,
        "plan": None if experiment.plan is None else str(experiment.plan),
        "topology": None if topology is None else topology.name,
        "chip": None if chip is None else chip.name,
        "n_chips": experiment.n_chips,
        "n_devices": experiment.n_devices,
        "n_layers": experiment.n_layers,
        "batch": None if workload is None else workload.batch,
        "prompt": None if workload is None else workload.prompt,
        "output": None if workload is None else workload.output,
        "engine": None if experiment.engine is None else experiment.engine.value,
        "frontend": None if program is None else program.frontend.value,
        "partitioner": None if program is None else program.partitioner.value,
        "created": manifest.created,
        "versions": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
    }


def named(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """Each run by its folder's name, or by its path if two folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    return [
        (name if names.count(name) == 1 else str(folder), folder)
        for name, folder in zip(names, folders, strict=True)
    ]


def events_table(folders: Sequence[Path]) -> pl.DataFrame:
    """The event tables of all runs, with the run's name as the last column."""
    tables = [_with_run(read_events(folder), name) for name, folder in named(folders)]
    return pl.concat(tables)


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


def _without_traces(folders: Sequence[Path]) -> list[Path]:
    return [folder for folder in folders if not has_executions(folder)]


@contextmanager
def database(folders: Sequence[Path]) -> Generator[duckdb.DuckDBPyConnection]:
    """A connection that reads the views of these runs and nothing else; SpecError for SQL errors."""
    names = {folder: name for name, folder in named(folders)}
    traces = {names[folder]: folder for folder in folders if has_executions(folder)}
    tables = {
        "events": events_table(folders),
        "runs": runs_table(folders),
        "summary": summary_view(folders),
        _MODELED if traces else "timeline": timeline_table(_without_traces(folders)),
    }
    try:
        with duckdb.connect(":memory:") as connection:
            _fill(connection, tables)
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
            views = ", ".join(view.name for view in VIEWS)
            reason = f"{reason.partition(chr(10))[0]} Views: {views}."
        raise SpecError(f"SQL: {reason}") from error
    except duckdb.Error as error:
        raise SpecError(f"SQL: {error}") from error
    except RuntimeError as error:
        if "interrupted" in str(error):  # how DuckDB reports Ctrl-C
            raise KeyboardInterrupt from error
        raise


def _add_traces(connection: duckdb.DuckDBPyConnection, traces: Mapping[str, Path]) -> None:
    """Adds every execution of imported traces to `timeline`; their facts stay in a table of their own."""
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


def _fill(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pl.DataFrame]) -> None:
    """Creates the tables from Parquet files: the other ways need pyarrow or pandas."""
    with scratch_folder() as scratch:
        for name, table in tables.items():
            path = scratch / f"{name}.parquet"
            table.write_parquet(path)
            connection.read_parquet(str(path)).create(name)


def answer(
    connection: duckdb.DuckDBPyConnection, query: str, most: int | None = None
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Unique column names and the rows, at most so many; SpecError for anything but one reading query."""
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
