"""Writes a run in the format of another tool."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from meshscope.analysis.timeline import has_executions
from meshscope.api.console import note, print_json
from meshscope.api.options import JsonOutput, option
from meshscope.errors import MissingToolError, SpecError
from meshscope.events.timeline import Timeline
from meshscope.files import path_of
from meshscope.reports.export.card import card_text
from meshscope.reports.export.ccl_bench import write_ccl_bench
from meshscope.reports.export.chakra import write_chakra
from meshscope.reports.export.chrome import write_chrome
from meshscope.reports.export.files import MARK, new_directory, new_file, write_csv, write_parquet
from meshscope.reports.export.perfetto import write_perfetto
from meshscope.reports.export.run_timeline import RunTimeline, run_timeline, timeline_of, title_of
from meshscope.reports.export.serving_timeline import serving_timeline
from meshscope.reports.export.trace_tracks import trace_tracks
from meshscope.reports.html.serving_page import serving_charts, serving_html
from meshscope.reports.serving import serving_title
from meshscope.serving.simulation import ServingOutcome
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
    PLOTS = "plots"


MAX_RUNS = 24  # side by side in one plot

# Ending of the default output: the run's name and this.
ENDINGS: dict[ExportFormat, str] = {
    ExportFormat.PERFETTO: ".perfetto-trace",
    ExportFormat.CHROME: ".trace.json.gz",
    ExportFormat.CARD: ".card.yaml",
    ExportFormat.CCL_BENCH: "-ccl-bench",
    ExportFormat.CSV: ".csv",
    ExportFormat.PARQUET: ".parquet",
    ExportFormat.CHAKRA: "-chakra",
    ExportFormat.PLOTS: "-plots",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A written export: its file or folder, and what the reader should know about it."""

    path: Path
    note: str | None


def export(
    runs: Sequence[Path], to: ExportFormat, *, out: Path | None = None, force: bool = False
) -> Export:
    """Writes the run, or several as plots, to `out` or next to the run; `force` replaces an export.

    Raises:
        MeshscopeError: A run cannot be read, or `out` holds something else.
    """
    if len(runs) > 1 and to is not ExportFormat.PLOTS:
        raise SpecError(
            f"--to {to} takes one run, not {len(runs)}. Export them one by one; plots and report take several."
        )
    if len(runs) > MAX_RUNS:
        raise SpecError(
            f"{len(runs)} runs are too many for one plot; at most {MAX_RUNS} fit. Give fewer."
        )
    if len(runs) > 1 and out is None:
        raise SpecError(f"plots of {len(runs)} runs need a folder. Give one with --out DIR.")
    records = [read_run(path_of(run)) for run in runs]
    is_dots = not runs[0].name.strip(".")
    place = Path(os.path.abspath(runs[0])) if is_dots else runs[0]  # noqa: PTH100  it may be a link
    path = out or place.with_name(place.resolve().name + ENDINGS[to])
    run, note = records[0], None
    match to:
        case ExportFormat.PLOTS:
            note = write_plot_folder(records, path, force=force)
        case ExportFormat.CCL_BENCH | ExportFormat.CHAKRA:
            timeline = run_timeline(run)
            with new_directory(path, force=force) as partial:
                if to is ExportFormat.CHAKRA:
                    write_chakra(timeline, partial)
                else:
                    write_ccl_bench(run, timeline, partial)
                _mark(partial, to)
            note = _note(timeline, has_all_devices=to is ExportFormat.CHAKRA)
        case ExportFormat.PERFETTO | ExportFormat.CHROME:
            timeline, note = _timeline(run)
            with new_file(path, force=force) as partial:
                _write_timeline(timeline, partial, path, is_perfetto=to is ExportFormat.PERFETTO)
        case ExportFormat.CSV | ExportFormat.PARQUET | ExportFormat.CARD:
            write = {ExportFormat.CSV: write_csv, ExportFormat.PARQUET: write_parquet}
            with new_file(path, force=force) as partial:
                write.get(to, write_card)(run, partial)
    return Export(path=path, note=note)


def write_card(run: RunRecord, path: Path) -> None:
    """Writes the workload card as YAML."""
    path.write_text(card_text(run), encoding="utf-8")


def _write_timeline(timeline: Timeline, partial: Path, path: Path, *, is_perfetto: bool) -> None:
    if is_perfetto:
        write_perfetto(timeline, partial)
    else:
        write_chrome(timeline, partial, is_gzipped=path.suffix == ".gz")


def _timeline(run: RunRecord) -> tuple[Timeline, str | None]:
    """Every execution of an imported trace, else one step of each phase; and what is left out."""
    if run.path is not None and has_executions(run.path):
        trace = trace_tracks(run.path, title_of(run))
        is_whole = trace.n_shown == trace.n_executions
        note = f"the last {trace.n_shown:,} of {trace.n_executions:,} ops"
        return trace.timeline, None if is_whole else note
    timeline = run_timeline(run)
    return timeline_of(timeline), _note(timeline)


def pictures() -> Any:
    """The module that draws plots; MissingToolError without vl-convert."""
    try:
        return import_module("meshscope.reports.charts.pictures")
    except ImportError as error:
        raise MissingToolError(
            "plots need vl-convert-python, which is not installed. "
            "Install the extra in your clone: pip install -e '.[plots]'."
        ) from error


def write_plot_folder(runs: Sequence[RunRecord], path: Path, *, force: bool) -> str:
    """Writes a folder of PNG and SVG files; returns which plots are missing, and why."""
    write_pictures = pictures().write_pictures
    with new_directory(path, force=force) as partial:
        n_drawn, missing = write_pictures(list(runs), partial)
        _mark(partial, ExportFormat.PLOTS)
    return "; ".join([f"{n_drawn} plots", *(f"no {name}: {why}" for name, why in missing)])


def _mark(folder: Path, to: ExportFormat) -> None:
    """Marks the folder as an export, which `force` may replace."""
    (folder / MARK).parent.mkdir(exist_ok=True)
    (folder / MARK).write_text(f'{{"tool": "meshscope", "to": "{to}"}}\n')


def _note(timeline: RunTimeline, *, has_all_devices: bool = False) -> str | None:
    notes = [] if timeline.is_time else ["the order of the schedule, not time"]
    if len(timeline.devices) < timeline.n_devices and not has_all_devices:
        notes.append(f"the first {len(timeline.devices)} of {timeline.n_devices} devices")
    return "; ".join(notes) or None


def save_serving(outcome: ServingOutcome, path: Path, *, force: bool = False) -> None:
    """Writes a simulated server: a page, a plot, or a trace of its engines and requests, by the ending of the path."""
    with new_file(path, force=force) as partial:
        if path.suffix == ".html":
            partial.write_text(serving_html(outcome), encoding="utf-8")
        elif path.suffix in {".png", ".svg"}:
            charts, to = list(serving_charts(outcome)), path.suffix.removeprefix(".")
            pictures().write_stacked(charts, serving_title(outcome), partial, to=to)
        else:
            timeline = serving_timeline(outcome, serving_title(outcome))
            is_perfetto = path.suffix == ENDINGS[ExportFormat.PERFETTO]
            _write_timeline(timeline, partial, path, is_perfetto=is_perfetto)


def command(
    *,
    runs: list[Path] = option("RUN...: The folder of a run; for plots, of several.", kw_only=False),
    to: ExportFormat = option("The format; plots need the extra plots."),
    out: Path | None = option(
        "PATH: A file, or a folder for ccl-bench, chakra and plots.",
        default=None,
        shown="beside the run, by its name",
    ),
    force: bool = option("Replace an earlier export.", default=False),
    output: JsonOutput,
) -> None:
    """Export a run: Perfetto, Chrome, Chakra, CSV, CCL-Bench, plots.

    Timelines: perfetto, chrome. Tables: csv, parquet. Execution traces: chakra. CCL-Bench: its workload card
    (card), or card, trace and metrics (ccl-bench). Timelines show one step of each phase on every device, by time if times are known, else in schedule order.
    Plots show several runs side by side.
    """  # fmt: skip
    written = export(runs, to, out=out, force=force)
    if output.as_json:
        names = {"run": str(runs[0])} if len(runs) == 1 else {"runs": list(map(str, runs))}
        print_json({**names, "to": to.value, "path": str(written.path), "note": written.note})
        return
    note(f"wrote {written.path}{f' ({written.note})' if written.note else ''}")
