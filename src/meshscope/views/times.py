"""The time of a step and of a request, as a table and for --json; every figure with its basis and interval."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.request_time import ASSUMPTION, RequestTime, basis_of, request_time
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.store.run import RunRecord
from meshscope.units import format_seconds
from meshscope.views.plain import plain
from meshscope.views.tables import new_table

MAX_UNESTIMATED = 4  # sorts of work that are named
MIN_SHARE = 0.0005  # of a step, below which a line is left out


def time_document(run: RunRecord, source: Source) -> dict[str, Any] | None:
    """What --json says of modelled time; None where no step was modelled."""
    times = run.times_of(source)
    if not times:
        return None
    request = _request(run, times)
    intervals = {"ttft_s": request.ttft, "tpot_s": request.tpot, "e2e_s": request.e2e}
    return {
        "prefill_s": _point(request.ttft),
        "decode_step_s": _point(request.tpot),
        "ttft_s": _point(request.ttft),
        "tpot_s": _point(request.tpot),
        "e2e_s": _point(request.e2e),
        "basis": request.basis,
        "intervals": {n: [s.low_s, s.high_s] for n, s in intervals.items() if s is not None},
        "is_extrapolated": any(time.is_extrapolated for time in times),
        "assumption": ASSUMPTION,
        "steps": {time.phase.value: _step(time) for time in times},
    }


def _step(time: StepTime) -> dict[str, Any]:
    values = asdict(time)
    del values["source"], values["phase"]
    return {**values, "basis": basis_of([time]), "unestimated_frac": time.unestimated_frac}


def _point(seconds: TimeEstimate | None) -> float | None:
    return None if seconds is None else seconds.value_s


def _request(run: RunRecord, times: Sequence[StepTime]) -> RequestTime:
    workload = run.manifest.experiment.workload
    n_decode_steps = None if workload is None else workload.n_decode_steps
    return request_time(times, n_decode_steps=n_decode_steps)


def time_lines(run: RunRecord) -> Iterator[RenderableType]:
    """The steps side by side, then the request, then what the figures rest on; nothing where none is modelled."""
    times = [t for phase in Phase for source in run.sources for t in _times(run, phase, source)]
    if not times:
        return
    heads = [f"{time.phase}\n{time.source}" for time in times]
    table = new_table("time of one step", *heads)
    for name, cells in _rows(times):
        table.add_row(Text(name), *(Text(cell) for cell in cells))
    yield table
    for source in dict.fromkeys(time.source for time in times):
        yield from _request_lines(run, source)
    yield from _doubt_lines(times)


def _times(run: RunRecord, phase: Phase, source: Source) -> list[StepTime]:
    return [time for time in run.times_of(source) if time.phase is phase]


def _rows(times: Sequence[StepTime]) -> Iterator[tuple[str, list[str]]]:
    yield "step", [format_seconds(time.step.value_s) for time in times]
    yield "  between", [_interval(time.step) for time in times]
    yield "compute", [_with_share(time.compute_s, time) for time in times]
    axes = dict.fromkeys(axis for time in times for axis in time.exposed_by_axis_s)
    for axis in axes:
        cells = [_with_share(time.exposed_by_axis_s.get(axis, 0.0), time) for time in times]
        yield f"exposed communication, {plain(axis)}", cells
    hidden = [_hidden_s(time) for time in times]
    if any(h > MIN_SHARE * t.step.value_s for h, t in zip(hidden, times, strict=True)):
        yield "  hidden behind compute", [format_seconds(h) for h in hidden]
    if any(time.idle_s > MIN_SHARE * time.step.value_s for time in times):
        yield "idle", [_with_share(time.idle_s, time) for time in times]
    if any(time.bubble_s for time in times):
        yield "  of it waiting for other stages", [_with_share(t.bubble_s, t) for t in times]


def _hidden_s(time: StepTime) -> float:
    """Collectives that compute hides; what rounding leaves is nothing."""
    hidden_s = time.collective_s - time.exposed_s
    return hidden_s if hidden_s > MIN_SHARE * time.step.value_s else 0.0


def _with_share(seconds: float, time: StepTime) -> str:
    share = f" ({seconds / time.step.value_s:.0%})" if time.step.value_s else ""
    return f"{format_seconds(seconds)}{share}"


def _interval(seconds: TimeEstimate) -> str:
    if seconds.low_s is None:
        return "not known"
    return f"{format_seconds(seconds.low_s)} - {format_seconds(seconds.high_s)}"


def _request_lines(run: RunRecord, source: Source) -> Iterator[Text]:
    times = run.times_of(source)
    request = _request(run, times)
    named = (("TTFT", request.ttft), ("TPOT", request.tpot), ("end to end", request.e2e))
    figures = [f"{name} {format_seconds(s.value_s)}" for name, s in named if s is not None]
    mark = ", extrapolated" if any(time.is_extrapolated for time in times) else ""
    yield Text.assemble(
        (f"{source}: {', '.join(figures)}", "bold"), f"; basis {request.basis}{mark}"
    )


def _doubt_lines(times: Sequence[StepTime]) -> Iterator[Text]:
    yield Text(f"of {ASSUMPTION}", style="dim")
    for time in times:
        if time.unestimated_frac > MIN_SHARE:
            yield Text(_unestimated_words(time), style="dim")
    notes: dict[tuple[str, str], list[str]] = {}
    for time in times:
        for words in time.notes:
            notes.setdefault((time.source.value, words), []).append(time.phase.value)
    for (source, words), phases in notes.items():
        yield Text(f"{source} {' and '.join(phases)}: {plain(words)}", style="yellow")


def _unestimated_words(time: StepTime) -> str:
    named = [
        f"{u.count} x {plain(u.opcode)} {format_seconds(u.seconds.value_s)}{'' if u.is_known else ' (unknown operation)'}"
        for u in time.unestimated[:MAX_UNESTIMATED]
    ]
    low = sum(u.seconds.lower_s for u in time.unestimated) / time.step.value_s
    high = sum(u.seconds.upper_s for u in time.unestimated) / time.step.value_s
    return (
        f"{time.phase}: {time.unestimated_frac:.1%} of the {time.source} step ({low:.1%} to {high:.1%}) "
        f"without an estimate of the compiler, by roofline: {', '.join(named)}"
    )
