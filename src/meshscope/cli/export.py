"""`meshscope export`: a run in the format of another tool."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.export import ExportFormat, export
from meshscope.cli.options import JsonOption
from meshscope.cli.output import note, print_json


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="The folder of a run; for plots, of several."),
    ],
    *,
    to: Annotated[
        ExportFormat, typer.Option("--to", help="The format; plots need the extra plots.")
    ],
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
