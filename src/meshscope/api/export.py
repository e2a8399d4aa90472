"""Writes a run in the format of another tool."""

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.analysis.catalog import events_of
from meshscope.analysis.timeline import has_executions
from meshscope.api.console import Written
from meshscope.api.database import run_folders
from meshscope.api.options import option
from meshscope.errors import MissingToolError
from meshscope.events.timeline import printable
from meshscope.files import MARK, new_directory, new_file, path_of
from meshscope.reports.answer import title_of
from meshscope.reports.export.card import card_of, yaml_of
from meshscope.reports.export.ccl_bench import write_ccl_bench
from meshscope.reports.export.chakra import write_chakra
from meshscope.reports.export.chrome import Timeline, write_chrome
from meshscope.reports.export.timeline import (
    MAX_DEVICES,
    RunTimeline,
    run_timeline,
    timeline_of,
    trace_timeline,
)
from meshscope.reports.export.xplane import write_xplane
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord


class ExportFormat(StrEnum):
    """The formats of exports."""

    PERFETTO = "perfetto"
    CHROME = "chrome"
    CARD = "card"
    CCL_BENCH = "ccl-bench"
    CSV = "csv"
    PARQUET = "parquet"
    CHAKRA = "chakra"
    XPLANE = "xplane"
    PLOTS = "plots"


# Ending of the default output: the run's name and this.
ENDINGS: dict[ExportFormat, str] = {
    ExportFormat.PERFETTO: ".perfetto.json.gz",
    ExportFormat.CHROME: ".trace.json.gz",
    ExportFormat.CARD: ".card.yaml",
    ExportFormat.CCL_BENCH: "-tpu-ccl-bench",  # its tools recognize a TPU by the name of the folder
    ExportFormat.CSV: ".csv",
    ExportFormat.PARQUET: ".parquet",
    ExportFormat.CHAKRA: "-chakra",
    ExportFormat.XPLANE: "-xplane",
    ExportFormat.PLOTS: "-plots",
}
TIMELINES = frozenset({ExportFormat.PERFETTO, ExportFormat.CHROME})  # may show several runs

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a spreadsheet formula


def write_csv(run: RunRecord, path: Path) -> None:
    """Writes the event table with lists as JSON and unknown values as empty cells.

    Texts contain no control characters and are cut after 2,000 characters. A text that a
    spreadsheet would read as a formula gets a leading apostrophe.
    """

    def text(value: str | Sequence[Any]) -> str:
        if not isinstance(value, str):
            return json.dumps(value, separators=(",", ":"))
        cut = printable(value).replace("\n", " ").replace("\t", " ")
        return f"'{cut}" if cut.startswith(_FORMULA) else cut

    def texts(column: pl.Series) -> pl.Series:
        values = [None if value is None else text(value) for value in column.to_list()]
        return pl.Series(column.name, values, dtype=pl.String)

    columns = [texts(c) if isinstance(c.dtype, pl.String | pl.List) else c for c in events_of(run)]
    pl.DataFrame(columns).write_csv(path)


def pictures() -> Any:
    """The module that draws plots; MissingToolError without vl-convert."""
    try:
        return import_module("meshscope.reports.charts.pictures")
    except ImportError as error:
        needed = "plots need vl-convert-python, which is not installed"
        raise MissingToolError.of_extra(needed, "plots") from error


def in_notebook(text: str, draw: Callable[[Any], str]) -> str:
    """HTML of the text and, below it, the charts that `draw` makes with the module of pictures, if it is installed."""
    try:
        below = draw(pictures())
    except MissingToolError as error:
        below = f"<p><small>{escape(str(error))}</small></p>"
    return f"<pre>{escape(text)}</pre>{below}"


@contextmanager
def _marked_folder(path: Path, to: ExportFormat, *, force: bool) -> Generator[Path]:
    """A new folder that is marked as an export, which `force` may replace."""
    with new_directory(path, force=force) as partial:
        yield partial
        (partial / MARK).parent.mkdir(exist_ok=True)
        (partial / MARK).write_text(f'{{"tool": "meshscope", "to": "{to}"}}\n')


def command(
    *,
    run: Path = option(
        "RUN: The folder of a run; for perfetto and chrome, a folder or pattern of runs, too.",
        kw_only=False,
    ),
    to: ExportFormat = option("The format; plots need the extra plots."),
    out: Path | None = option(
        "PATH: A file, or a folder for ccl-bench, chakra, xplane and plots.",
        default=None,
        shown="beside the run, by its name",
    ),
    force: bool = option("Replace an earlier export.", default=False),
) -> Written:
    """Export a run: Perfetto, XPlane, Chakra, CSV, CCL-Bench, plots.

    Timelines: perfetto and chrome, which are one format, and xplane, a log folder for XProf and TensorBoard. Tables: csv, parquet. Execution traces: chakra. CCL-Bench: its workload card
    (card), or card, trace and metrics (ccl-bench). Timelines show one step of each phase on every device, by time if times are known, else in schedule order.
    """  # fmt: skip
    folders = run_folders(run) if to in TIMELINES else [path_of(run)]
    records = sorted(map(read_run, folders), key=title_of)
    place = run if run.exists() else run.parent  # of a pattern
    if not place.name.strip("."):
        place = Path(os.path.abspath(place))  # noqa: PTH100  it may be a link
    path = out or place.with_name(place.resolve().name + ENDINGS[to])
    known = "; ".join(_written(records, to, path, force=force)) or None
    document = {"run": str(run), "to": to.value, "path": str(path), "note": known}
    return Written(document, f"wrote {path}{f' ({known})' if known else ''}")


def _written(
    runs: Sequence[RunRecord], to: ExportFormat, path: Path, *, force: bool
) -> Iterator[str]:
    """Writes the runs, several of them as timelines alone, and says what the reader should know."""
    run = runs[0]
    match to:
        case ExportFormat.PLOTS:
            write_pictures = pictures().write_pictures
            with _marked_folder(path, to, force=force) as partial:
                yield f"{write_pictures(run, partial)} plots"
            yield from map(str, run.open_operations)
        case ExportFormat.CSV:
            with new_file(path, force=force) as partial:
                write_csv(run, partial)
        case ExportFormat.PARQUET:
            with new_file(path, force=force) as partial:
                events_of(run).write_parquet(partial)
        case ExportFormat.CARD:
            with new_file(path, force=force) as partial:
                partial.write_text(yaml_of(card_of(run)), encoding="utf-8")
        case ExportFormat.CHAKRA:
            timeline = run_timeline(run)
            with _marked_folder(path, to, force=force) as partial:
                write_chakra(timeline, partial)
            yield from _left_out(timeline, has_all_devices=True)
        case ExportFormat.CCL_BENCH:
            timeline = run_timeline(run)
            with _marked_folder(path, to, force=force) as partial:
                yield from _checks(write_ccl_bench(run, timeline, partial, path.name), path)
            yield from _left_out(timeline)
        case ExportFormat.XPLANE:
            shown, left_out = _timeline(run)
            with _marked_folder(path, to, force=force) as partial:
                write_xplane(shown, partial)
            yield from left_out
        case ExportFormat.PERFETTO | ExportFormat.CHROME:
            n_devices = max(1, MAX_DEVICES // len(runs))
            timelines, left_out = zip(*(_timeline(one, n_devices) for one in runs), strict=True)
            with new_file(path, force=force) as partial:
                write_chrome(timelines, partial, is_gzipped=path.suffix == ".gz")
            if len(runs) > 1:
                yield f"{len(runs)} runs"
            yield from dict.fromkeys(note for notes in left_out for note in notes)


def _timeline(run: RunRecord, max_devices: int = MAX_DEVICES) -> tuple[Timeline, list[str]]:
    """The timeline of a run, and what it leaves out."""
    if run.path is not None and has_executions(run.path):
        title = f"{title_of(run)}, {run.manifest.source}"
        shown, n, n_all = trace_timeline(run.path, title)
        return shown, [] if n == n_all else [f"the last {n:,} of {n_all:,} ops"]
    timeline = run_timeline(run, max_devices)
    return timeline_of(timeline), list(_left_out(timeline))


def _checks(document: Mapping[str, Any], path: Path) -> Iterator[str]:
    """How many metrics CCL-Bench's tools have, and the file that has their values."""
    entries = document["metrics"].values()
    n = sum(entry["ccl_bench"]["value"] is not None for entry in entries)
    if n:
        checks = path / "meshscope" / "metrics.json"
        yield f"its tools have {n} of {len(entries)} metrics; {checks} has what each prints"
    if "tpu" not in path.name.lower():
        yield "the tools have bandwidths only if 'tpu' is in the name of the folder: rename it"


def _left_out(timeline: RunTimeline, *, has_all_devices: bool = False) -> Iterator[str]:
    if not timeline.is_time:
        yield "the order of the schedule, not time"
    if len(timeline.devices) < timeline.n_devices and not has_all_devices:
        yield f"the first {len(timeline.devices)} of {timeline.n_devices} devices"
