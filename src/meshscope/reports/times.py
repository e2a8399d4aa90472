"""Step and request times with basis and interval, as text and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.request import (
    ASSUMPTION,
    RequestTime,
    Throughput,
    basis_of,
    request_times,
    throughput_of,
)
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.hardware.chips import Chip
from meshscope.reports.model import (
    CellValue,
    Figure,
    Unit,
    ViewTable,
    figure_column,
    joined,
    text_column,
)
from meshscope.reports.plain import plain
from meshscope.reports.roofs import floor_lines, floor_rows
from meshscope.reports.tables import rich_table
from meshscope.serialize import to_plain
from meshscope.store.run import RunRecord
from meshscope.units import format_rate, format_seconds

MAX_UNESTIMATED = 4  # named opcodes without a compiler estimate
MIN_SHARE = 0.0005  # fraction of a step below which a row is omitted
LARGE_UNESTIMATED_FRAC = 0.05  # of a step; the short text omits smaller shares


def time_document(run: RunRecord, source: Source) -> dict[str, Any] | None:
    """The JSON object `time` of one source; None if no step of it has a time.

    Measured times have no intervals.
    """
    request = request_times(run).get(source)
    if request is None:
        return None
    seconds = {
        "prefill_s": _seconds(request.ttft),
        "decode_step_s": _seconds(request.decode_step),
        "step_s": _seconds(request.step),
        "ttft_s": _seconds(request.ttft),
        "tpot_s": _seconds(request.tpot),
        "e2e_s": _seconds(request.e2e),
        "basis": request.basis,
    }
    return seconds if source is Source.MEASURED else seconds | _modeled(run, source, request)


def _modeled(run: RunRecord, source: Source, request: RequestTime) -> dict[str, Any]:
    estimates = {"ttft_s": request.ttft, "tpot_s": request.tpot, "e2e_s": request.e2e}
    estimates["step_s"] = request.step
    return {
        "intervals": {n: [t.low_s, t.high_s] for n, t in estimates.items() if t is not None},
        "is_extrapolated": request.is_extrapolated,
        "assumption": ASSUMPTION,
        "steps": {time.phase.value: _step(time) for time in run.times_of(source)},
    }


def _step(time: StepTime) -> dict[str, Any]:
    values = to_plain(time)
    del values["source"], values["phase"]
    return {**values, "basis": basis_of([time]), "unestimated_frac": time.unestimated_frac}


def _seconds(time: TimeEstimate | None) -> float | None:
    return None if time is None else time.value_s


def time_figure(time: TimeEstimate | None, *, basis: str | None = None) -> Figure:
    """A duration with its interval and basis."""
    if time is None:
        return Figure(value=None, unit=Unit.SECONDS, basis=basis)
    return Figure(
        value=time.value_s, unit=Unit.SECONDS, low=time.low_s, high=time.high_s, basis=basis
    )


def time_lines(run: RunRecord) -> Iterator[RenderableType]:
    """The modeled steps side by side, with their lower bounds and what they take beyond them."""
    times = _times(run)
    if times:
        experiment = run.manifest.experiment
        yield rich_table(step_table(times, experiment.chip, experiment.weight_dtype))
        yield from floor_lines(times, experiment.chip, experiment.weight_dtype)


def caveat_lines(run: RunRecord, *, is_full: bool = True) -> Iterator[Text]:
    """The whole request by each source of modeled times, and the caveats.

    In full, with the basis, the assumptions and small shares of work without a compiler estimate.
    """
    times, requests = _times(run), request_times(run)
    for source in dict.fromkeys(time.source for time in times):
        request = requests[source]
        figures = _request_figures(request, throughput_of(request, run))
        basis = f"basis {request.basis}{', extrapolated' if request.is_extrapolated else ''}"
        words = [*([figures] if figures else []), *([basis] if is_full else [])]
        if words:
            yield Text(f"{source} {'request' if figures else 'times'}: {'; '.join(words)}", "dim")
    if times and is_full:
        yield Text(f"assumes {ASSUMPTION}", style="dim")
    least_frac = MIN_SHARE if is_full else LARGE_UNESTIMATED_FRAC
    yield from (Text(_unestimated_text(t), "dim") for t in times if t.unestimated_frac > least_frac)
    for steps, note in step_notes(times):
        yield Text(f"{steps}: {plain(note)}", style="yellow")


def _times(run: RunRecord) -> list[StepTime]:
    """The modeled steps in the order of the phases, the sources of a phase side by side."""
    return [t for phase in Phase for s in run.sources for t in run.times_of(s) if t.phase is phase]


def step_table(
    times: Sequence[StepTime], chip: Chip | None = None, weight_dtype: str | None = None
) -> ViewTable:
    """One column for each step: its time, its interval, the parts of the time, and its lower bounds."""
    labels = [f"{time.phase}\n{time.source}" for time in times]
    columns = (figure_column(label, Unit.SECONDS) for label in labels)
    rows = (*_rows(times), *floor_rows(times, chip, weight_dtype))
    return ViewTable(
        columns=(text_column("time of one step"), *columns),
        rows=tuple((label, *cells) for label, cells in rows),
    )


def _rows(times: Sequence[StepTime]) -> Iterator[tuple[str, list[CellValue]]]:
    yield "step", [time.step.value_s for time in times]
    yield "  range", [time_figure(time.step).range_text for time in times]
    yield "compute", [_share(time.compute_s, time) for time in times]
    axes = dict.fromkeys(axis for time in times for axis in time.exposed_by_axis_s)
    for axis in axes:
        cells = [_share(time.exposed_by_axis_s.get(axis, 0.0), time) for time in times]
        yield f"exposed over {axis}", [*cells]
    hidden = [_hidden_s(time) for time in times]
    if any(hidden):
        yield "  hidden behind compute", [*hidden]
    if any(time.idle_s > MIN_SHARE * time.step.value_s for time in times):
        yield "idle", [_share(time.idle_s, time) for time in times]
    if any(time.bubble_s for time in times):
        yield "  waiting for other stages", [_share(t.bubble_s, t) for t in times]


def _hidden_s(time: StepTime) -> float:
    """Seconds of collectives hidden behind compute; 0 below MIN_SHARE, which is rounding."""
    hidden_s = time.collective_s - time.exposed_s
    return hidden_s if hidden_s > MIN_SHARE * time.step.value_s else 0.0


def _share(seconds: float, time: StepTime) -> Figure:
    share = seconds / time.step.value_s if time.step.value_s else None
    return Figure(value=seconds, unit=Unit.SECONDS, share_frac=share)


def _request_figures(request: RequestTime, rates: Throughput | None) -> str:
    """`952 ms end to end, 1,076 request tokens/s`."""
    figures: list[str] = []
    if request.e2e is not None:
        figures.append(f"{format_seconds(request.e2e.value_s)} end to end")
    if rates is not None and rates.output_tokens_per_s is not None:
        figures.append(f"{format_rate(rates.output_tokens_per_s)} request tokens/s")
    return ", ".join(figures)


def step_notes(times: Sequence[StepTime]) -> Iterator[tuple[str, str]]:
    """Each note once, behind the steps that have it: `predicted prefill and decode`."""
    notes: dict[tuple[str, str], list[str]] = {}
    for time in times:
        for note in time.notes:
            notes.setdefault((time.source.value, note), []).append(time.phase.value)
    for (source, note), phases in notes.items():
        yield f"{source} {joined(phases)}", note


def _unestimated_text(time: StepTime) -> str:
    named = [
        f"{work.count} x {plain(work.opcode)} {format_seconds(work.seconds.value_s)}"
        f"{'' if work.is_known else ' (unknown operation)'}"
        for work in time.unestimated[:MAX_UNESTIMATED]
    ]
    low = sum(work.seconds.lower_s for work in time.unestimated) / time.step.value_s
    high = sum(work.seconds.upper_s for work in time.unestimated) / time.step.value_s
    return (
        f"{time.phase}: the compiler estimates no cycles for {time.unestimated_frac:.1%} of the "
        f"{time.source} step ({low:.1%} to {high:.1%}), timed by roofline: {', '.join(named)}"
    )
