"""Writes a run in the format of another tool."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, assert_never

from meshscope.analysis.timeline import has_executions
from meshscope.api.console import note, print_json
from meshscope.api.options import JsonOption, Option
from meshscope.api.plot_tools import plot_tools
from meshscope.errors import SpecError
from meshscope.events.timeline import Timeline
from meshscope.files import path_of
from meshscope.reports.export.card import card_text
from meshscope.reports.export.ccl_bench import write_ccl_bench
from meshscope.reports.export.chakra import write_chakra
from meshscope.reports.export.chrome import write_chrome
from meshscope.reports.export.files import MARK, new_directory, new_file, write_csv, write_parquet
from meshscope.reports.export.perfetto import write_perfetto
from meshscope.reports.export.run_timeline import RunTimeline, run_timeline, timeline_of, title_of
from meshscope.reports.export.trace_tracks import trace_tracks
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
    """Writes the run, or several as plots, to `out` or beside the run; `force` replaces an export.

    Raises:
        MeshscopeError: A run cannot be read, or `out` holds something else.
    """
    _check_number(runs, to, out)
    records = [read_run(path_of(run)) for run in runs]
    is_dots = not runs[0].name.strip(".")
    place = Path(os.path.abspath(runs[0])) if is_dots else runs[0]  # noqa: PTH100  it may be a link
    path = out or place.with_name(place.resolve().name + ENDINGS[to])
    if len(records) == 1:
        return Export(path=path, note=_write(records[0], to, path, force=force))
    return Export(path=path, note=write_plot_folder(records, path, force=force))


def _check_number(runs: Sequence[Path], to: ExportFormat, out: Path | None) -> None:
    """SpecError for several runs in a format that holds one, or without a folder."""
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


def _write(run: RunRecord, to: ExportFormat, path: Path, *, force: bool) -> str | None:
    """Writes the export and returns its note."""
    match to:
        case ExportFormat.PLOTS:
            return write_plot_folder([run], path, force=force)
        case ExportFormat.CCL_BENCH | ExportFormat.CHAKRA:
            return _write_folder(run, to, path, force=force)
        case ExportFormat.PERFETTO | ExportFormat.CHROME:
            return _write_timeline(run, to, path, force=force)
        case ExportFormat.CSV | ExportFormat.PARQUET | ExportFormat.CARD:
            with new_file(path, force=force) as partial:
                if to is ExportFormat.CSV:
                    write_csv(run, partial)
                elif to is ExportFormat.PARQUET:
                    write_parquet(run, partial)
                else:
                    partial.write_text(card_text(run), encoding="utf-8")
            return None
        case _:
            assert_never(to)


def _write_timeline(run: RunRecord, to: ExportFormat, path: Path, *, force: bool) -> str | None:
    timeline, note = _timeline(run)
    with new_file(path, force=force) as partial:
        if to is ExportFormat.PERFETTO:
            write_perfetto(timeline, partial)
        else:
            write_chrome(timeline, partial, is_gzipped=path.suffix == ".gz")
    return note


def _timeline(run: RunRecord) -> tuple[Timeline, str | None]:
    """Every execution of an imported trace, else one step of each phase; and what is left out."""
    if run.path is not None and has_executions(run.path):
        trace = trace_tracks(run.path, title_of(run))
        is_whole = trace.n_shown == trace.n_executions
        note = f"the last {trace.n_shown:,} of {trace.n_executions:,} ops"
        return trace.timeline, None if is_whole else note
    timeline = run_timeline(run)
    return timeline_of(timeline), _note(timeline)


def write_plot_folder(runs: Sequence[RunRecord], path: Path, *, force: bool) -> str:
    """Writes a folder of PNG and SVG files; returns which plots are missing, and why."""
    with plot_tools():
        from meshscope.reports.charts.pictures import write_pictures  # noqa: PLC0415  only plots need it
    with new_directory(path, force=force) as partial:
        n_drawn, missing = write_pictures(list(runs), partial)
        _mark(partial, ExportFormat.PLOTS)
    return "; ".join([f"{n_drawn} plots", *(f"no {name}: {why}" for name, why in missing)])


def _mark(folder: Path, to: ExportFormat) -> None:
    """Marks the folder as an export, which `force` may replace."""
    (folder / MARK).parent.mkdir(exist_ok=True)
    (folder / MARK).write_text(f'{{"tool": "meshscope", "to": "{to}"}}\n')


def _write_folder(run: RunRecord, to: ExportFormat, path: Path, *, force: bool) -> str | None:
    timeline = run_timeline(run)
    with new_directory(path, force=force) as partial:
        if to is ExportFormat.CHAKRA:
            write_chakra(timeline, partial)
        else:
            write_ccl_bench(run, timeline, partial)
        _mark(partial, to)
    return _note(timeline, has_all_devices=to is ExportFormat.CHAKRA)


def _note(timeline: RunTimeline, *, has_all_devices: bool = False) -> str | None:
    notes = [] if timeline.is_time else ["the order of the schedule, not time"]
    if len(timeline.devices) < timeline.n_devices and not has_all_devices:
        notes.append(f"the first {len(timeline.devices)} of {timeline.n_devices} devices")
    return "; ".join(notes) or None


def command(
    runs: Annotated[
        list[Path],
        Option(
            help="The folder of a run; for plots, of several.", metavar="RUN...", is_argument=True
        ),
    ],
    *,
    to: Annotated[ExportFormat, Option(help="The format; plots need the extra plots.")],
    out: Annotated[
        Path | None,
        Option(
            help="A file, or a folder for ccl-bench, chakra and plots.",
            metavar="PATH",
            shown="beside the run, by its name",
        ),
    ] = None,
    force: Annotated[bool, Option(help="Replace an earlier export.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a run: Perfetto, Chrome, Chakra, CSV, CCL-Bench, plots.

    Timelines: perfetto, chrome. Tables: csv, parquet. Execution traces: chakra. CCL-Bench: its workload card
    (card), or card, trace and metrics (ccl-bench). Timelines show one step of each phase on every device, by time if times are known, else in schedule order.
    Plots show several runs side by side.
    """  # fmt: skip
    written = export(runs, to, out=out, force=force)
    if as_json:
        names = {"run": str(runs[0])} if len(runs) == 1 else {"runs": list(map(str, runs))}
        document = {**names, "to": to.value, "path": str(written.path), "note": written.note}
        print_json(document)
        return
    note(f"wrote {written.path}{f' ({written.note})' if written.note else ''}")
