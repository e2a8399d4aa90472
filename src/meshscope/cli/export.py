"""`meshscope export`: a run in the form of another tool."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, assert_never

import typer

from meshscope.cli.options import JsonOption
from meshscope.cli.output import note, print_json
from meshscope.errors import MissingToolError, SpecError
from meshscope.exporters.card import card_text
from meshscope.exporters.ccl_bench import write_ccl_bench
from meshscope.exporters.chakra import write_chakra
from meshscope.exporters.chrome import write_chrome
from meshscope.exporters.files import MARK, new_directory, new_file
from meshscope.exporters.perfetto import write_perfetto
from meshscope.exporters.run_timeline import RunTimeline, run_timeline
from meshscope.exporters.run_tracks import timeline_of
from meshscope.exporters.tables import write_csv, write_parquet
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord


class ExportFormat(StrEnum):
    """What a run can be exported to."""

    PERFETTO = "perfetto"
    CHROME = "chrome"
    CARD = "card"
    CCL_BENCH = "ccl-bench"
    CSV = "csv"
    PARQUET = "parquet"
    CHAKRA = "chakra"
    PLOTS = "plots"


MAX_RUNS = 24  # side by side in one plot

# What the output is called when nobody says: the run's name and this.
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


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="The folder of a run; for plots, of several."),
    ],
    *,
    to: Annotated[ExportFormat, typer.Option("--to", help="The form.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="A file, or a folder for ccl-bench, chakra and plots.",
            show_default="beside the run, by its name",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a run: Perfetto, Chrome, Chakra, CSV, CCL-Bench, plots.

    Timelines: perfetto, chrome. Tables: csv, parquet. Execution traces: chakra. CCL-Bench's workload card:
    card, with a trace that its tools take and both definitions of its metrics: ccl-bench. Timelines show a step of each phase on every device, at its times where it has some, and otherwise in
    the order of the schedule, which they say. Plots of several runs stand side by side.
    """  # fmt: skip
    path = _place(runs, to, out)
    found = [read_run(run) for run in runs]
    note_of = (
        _write(found[0], to, path, force=force)
        if len(found) == 1
        else _write_plots(found, path, force=force)
    )
    if as_json:
        own = {"run": str(runs[0])} if len(runs) == 1 else {"runs": list(map(str, runs))}
        print_json({**own, "to": to.value, "path": str(path), "note": note_of})
        return
    note(f"wrote {path}{f' ({note_of})' if note_of else ''}")


def _place(runs: list[Path], to: ExportFormat, out: Path | None) -> Path:
    """Where the export goes; SpecError for several runs where only one can be exported."""
    if len(runs) > 1 and to is not ExportFormat.PLOTS:
        raise SpecError(
            f"--to {to} takes one run, not {len(runs)}. Export them one by one; plots and report take several."
        )
    if len(runs) > MAX_RUNS:
        raise SpecError(
            f"{len(runs)} runs are too many for one plot; at most {MAX_RUNS} stand side by side. Give fewer."
        )
    if out is not None:
        return out
    if len(runs) > 1:
        raise SpecError(
            f"plots of {len(runs)} runs belong to none of them. Say where with --out DIR."
        )
    return runs[0].with_name(runs[0].resolve().name + ENDINGS[to])


def _write(run: RunRecord, to: ExportFormat, path: Path, *, force: bool) -> str | None:
    """Writes the export; what there is to say about it."""
    match to:
        case ExportFormat.PLOTS:
            return _write_plots([run], path, force=force)
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
    layout = run_timeline(run)
    with new_file(path, force=force) as partial:
        if to is ExportFormat.PERFETTO:
            write_perfetto(timeline_of(layout), partial)
        else:
            write_chrome(timeline_of(layout), partial, is_gzipped=path.suffix == ".gz")
    return _note_of(layout)


def _write_plots(runs: list[RunRecord], path: Path, *, force: bool) -> str | None:
    """A folder of PNG and SVG files; which plots the run cannot have, and why."""
    try:
        from meshscope.views.plots.write import write_plots  # noqa: PLC0415  only plots need matplotlib
    except ImportError as error:
        raise MissingToolError(
            "plots need matplotlib, which is not installed. Install the extra: pip install 'meshscope[plots]'."
        ) from error
    with new_directory(path, force=force) as partial:
        drawn = write_plots(runs, partial)
        _mark(partial, ExportFormat.PLOTS)
    missing = [f"no {one.name}: {one.reason}" for one in drawn if one.figure is None]
    return "; ".join([f"{len(drawn) - len(missing)} plots", *missing])


def _mark(folder: Path, to: ExportFormat) -> None:
    """Says that the folder is an export, which may be replaced."""
    (folder / MARK).parent.mkdir(exist_ok=True)
    (folder / MARK).write_text(f'{{"tool": "meshscope", "to": "{to}"}}\n')


def _write_folder(run: RunRecord, to: ExportFormat, path: Path, *, force: bool) -> str | None:
    layout = run_timeline(run)
    with new_directory(path, force=force) as partial:
        if to is ExportFormat.CHAKRA:
            write_chakra(layout, partial)
        else:
            write_ccl_bench(run, layout, partial)
        _mark(partial, to)
    is_whole = to is ExportFormat.CHAKRA
    return _note_of(layout, is_whole=is_whole)


def _note_of(layout: RunTimeline, *, is_whole: bool = False) -> str | None:
    told = [] if layout.is_time else ["the order of the schedule, not time"]
    if len(layout.devices) < layout.n_devices and not is_whole:
        told.append(f"the first {len(layout.devices)} of {layout.n_devices} devices")
    return "; ".join(told) or None
