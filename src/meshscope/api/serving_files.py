"""Files of a simulated server: a page, a plot, or a trace of its engines and requests."""

from pathlib import Path

from meshscope.api.plot_tools import plot_tools
from meshscope.errors import SpecError
from meshscope.reports.charts.serving import series_chart, serving_charts
from meshscope.reports.export.chrome import write_chrome
from meshscope.reports.export.files import check_new, new_file
from meshscope.reports.export.perfetto import write_perfetto
from meshscope.reports.export.serving_timeline import serving_timeline
from meshscope.reports.html.serving_page import serving_html
from meshscope.reports.serving import serving_title
from meshscope.serving.simulation import ServingOutcome

PAGE, PERFETTO, CHROME = ".html", ".perfetto-trace", (".json", ".json.gz")
PLOTS = (".png", ".svg")
ENDINGS = (PAGE, *PLOTS, PERFETTO, *CHROME)


def check_place(path: Path, *, force: bool) -> None:
    """SpecError for an unknown ending, RunError if the file exists and `force` is not set."""
    if not path.name.endswith(ENDINGS):
        raise SpecError(f"--out '{path}': the ending says what to write. Use {', '.join(ENDINGS)}.")
    check_new(path, force=force)


def save_serving(outcome: ServingOutcome, path: Path, *, force: bool = False) -> None:
    """Writes what the ending of the path says."""
    check_place(path, force=force)
    with new_file(path, force=force) as partial:
        _write(outcome, path, partial)


def _write(outcome: ServingOutcome, path: Path, partial: Path) -> None:
    if path.suffix == PAGE:
        partial.write_text(serving_html(outcome), encoding="utf-8")
    elif path.suffix in PLOTS:
        _write_plot(outcome, partial, to=path.suffix.removeprefix("."))
    else:
        timeline = serving_timeline(outcome, serving_title(outcome))
        if path.suffix == PERFETTO:
            write_perfetto(timeline, partial)
        else:
            write_chrome(timeline, partial, is_gzipped=path.suffix == ".gz")


def _write_plot(outcome: ServingOutcome, partial: Path, *, to: str) -> None:
    with plot_tools():
        from meshscope.reports.charts.pictures import write_stacked  # noqa: PLC0415  only plots need it
    charts = list(map(series_chart, serving_charts(outcome)))
    write_stacked(charts, serving_title(outcome), partial, to=to)
