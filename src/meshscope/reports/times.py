"""Step and request times with basis and interval, and the bounds of the roofline, as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.request import ASSUMPTION, basis_of, request_times, throughput_of
from meshscope.analysis.roofline import (
    RESOURCES,
    StepFloor,
    reasons_in,
    roofline_bounds,
    step_floor,
    why_sentence,
    why_sentences,
)
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import NO_INTERVAL, StepTime, TimeEstimate
from meshscope.reports.model import (
    CellValue,
    Figure,
    Unit,
    ViewTable,
    joined,
    plain,
    table,
)
from meshscope.reports.tables import bullets, rich_table, with_first_block
from meshscope.serialize import to_plain
from meshscope.store.run import RunRecord
from meshscope.units import format_rate, format_seconds

MAX_UNESTIMATED = 4  # named opcodes without a compiler estimate
MIN_SHARE = 0.0005  # fraction of a step below which a row is omitted
LARGE_UNESTIMATED_FRAC = 0.05  # of a step; the short text omits smaller shares
MAX_FACTOR = 100  # a larger lead over the next bound is written `>100`


def time_document(run: RunRecord, source: Source) -> dict[str, Any] | None:
    """The JSON object `time` of one source; None if no step of it has a time.

    Measured times have no intervals.
    """
    request = request_times(run).get(source)
    if request is None:
        return None
    estimates = {
        "prefill_s": request.ttft,
        "decode_step_s": request.decode_step,
        "step_s": request.step,
        "ttft_s": request.ttft,
        "tpot_s": request.tpot,
        "e2e_s": request.e2e,
    }
    seconds = {name: None if t is None else t.value_s for name, t in estimates.items()}
    document = {**seconds, "basis": request.basis}
    if source is Source.MEASURED:
        return document
    intervals = {
        name: [t.low_s, t.high_s]
        for name in ("ttft_s", "tpot_s", "e2e_s", "step_s")
        if (t := estimates[name]) is not None
    }
    return {
        **document,
        "intervals": intervals,
        "no_interval": next(filter(None, (t.no_interval for t in run.times_of(source))), None),
        "is_extrapolated": request.is_extrapolated,
        "assumption": ASSUMPTION,
        "steps": {time.phase.value: _step(time) for time in run.times_of(source)},
    }


def _step(time: StepTime) -> dict[str, Any]:
    values = to_plain(time)
    del values["source"], values["phase"]
    return {**values, "basis": basis_of([time]), "unestimated_frac": time.unestimated_frac}


def time_figure(time: TimeEstimate | None) -> Figure:
    """A duration with its interval."""
    if time is None:
        return Figure(value=None, unit=Unit.SECONDS)
    return Figure(value=time.value_s, unit=Unit.SECONDS, low=time.low_s, high=time.high_s)


def time_lines(run: RunRecord) -> Iterator[RenderableType]:
    """The modeled steps side by side, with their lower bounds and what they take beyond them."""
    times = _times(run)
    if not times:
        return
    floors = _floors(run, times)
    labels = (f"{time.phase}\n{time.source}_s" for time in times)
    bounds = {
        "HBM bytes / rate": "hbm_s", "FLOPs / peak": "compute_s", "wire bytes / link rate": "link_s",
    }  # fmt: skip
    rows = [
        *_rows(times),
        *(
            (n, [getattr(one, field, None) for one in floors])
            for n, field in bounds.items()
            if any(floors)
        ),
    ]
    yield rich_table(table(("time of one step", *labels), ((n, *cells) for n, cells in rows)))
    experiment = run.manifest.experiment
    whys = [
        f"{time.source} {why_sentence(time, experiment.chip, experiment.weight_dtype, max_causes=len(floor.causes))}"
        for time, floor in zip(times, floors, strict=True)
        if floor is not None
    ]
    yield from map(Text, whys)
    yield bullets(reasons_in(whys))


def caveat_lines(run: RunRecord, *, is_full: bool = True) -> Iterator[Text]:
    """The whole request by each source of modeled times, and the caveats.

    In full, with the basis, the assumptions and small shares of work without a compiler estimate.
    """
    times, requests = _times(run), request_times(run)
    for source in dict.fromkeys(time.source for time in times):
        request = requests[source]
        rates, figures = throughput_of(request, run), list[str]()
        if request.e2e is not None:
            figures.append(f"{format_seconds(request.e2e.value_s)} end to end")
        if rates is not None and rates.output_tokens_per_s is not None:
            figures.append(f"{format_rate(rates.output_tokens_per_s)} request tokens/s")
        basis = f"basis {request.basis}{', extrapolated' if request.is_extrapolated else ''}"
        words = "; ".join(filter(None, (", ".join(figures), basis if is_full else "")))
        if words:
            yield Text(f"{source} {'request' if figures else 'times'}: {words}", "dim")
    if times and is_full:
        yield Text(f"assumes {ASSUMPTION}", style="dim")
    least_frac = MIN_SHARE if is_full else LARGE_UNESTIMATED_FRAC
    for time in times:
        if time.unestimated_frac <= least_frac:
            continue
        named = ", ".join(
            f"{work.count} x {plain(work.opcode)} {format_seconds(work.seconds.value_s)}"
            f"{'' if work.is_known else ' (unknown operation)'}"
            for work in time.unestimated[:MAX_UNESTIMATED]
        )
        low = sum(work.seconds.lower_s for work in time.unestimated) / time.step.value_s
        high = sum(work.seconds.upper_s for work in time.unestimated) / time.step.value_s
        text = (
            f"{time.phase}: the compiler estimates no cycles for {time.unestimated_frac:.1%} of the "
            f"{time.source} step ({low:.1%} to {high:.1%}), timed by roofline: {named}"
        )
        yield Text(text, "dim")
    for steps, note in step_notes(times):
        yield Text(f"{steps}: {plain(note)}", style="yellow")


def _times(run: RunRecord) -> list[StepTime]:
    return [t for phase in Phase for s in run.sources for t in run.times_of(s) if t.phase is phase]


def _rows(times: Sequence[StepTime]) -> Iterator[tuple[str, list[CellValue]]]:
    yield "step", [time.step.value_s for time in times]
    yield "  range", [time_figure(time.step).range_text for time in times]
    yield "compute", [_share(time.compute_s, time) for time in times]
    axes = dict.fromkeys(axis for time in times for axis in time.exposed_by_axis_s)
    for axis in axes:
        cells = [_share(time.exposed_by_axis_s.get(axis, 0.0), time) for time in times]
        yield f"exposed over {axis}", [*cells]
    hidden = [time.collective_s - time.exposed_s for time in times]
    least = [MIN_SHARE * time.step.value_s for time in times]  # smaller times are rounding
    shown = [s if s > least_s else 0.0 for s, least_s in zip(hidden, least, strict=True)]
    if any(shown):
        yield "  hidden behind compute", [*shown]
    if any(time.idle_s > MIN_SHARE * time.step.value_s for time in times):
        yield "idle", [_share(time.idle_s, time) for time in times]
    if any(time.bubble_s for time in times):
        yield "  waiting for other stages", [_share(t.bubble_s, t) for t in times]


def _share(seconds: float, time: StepTime) -> Figure:
    share = seconds / time.step.value_s if time.step.value_s else None
    return Figure(value=seconds, unit=Unit.SECONDS, share_frac=share)


def step_notes(times: Sequence[StepTime]) -> Iterator[tuple[str, str]]:
    """Each note once, after the steps that have it: `predicted prefill and decode`."""
    notes: dict[tuple[str, str], list[str]] = {}
    for time in times:
        for note in time.notes:
            if note.startswith(NO_INTERVAL):
                continue  # the answer says it
            notes.setdefault((time.source.value, note), []).append(time.phase.value)
    for (source, note), phases in notes.items():
        yield f"{source} {joined(phases)}", note


def _floors(run: RunRecord, times: Sequence[StepTime]) -> list[StepFloor | None]:
    chip, dtype = run.manifest.experiment.chip, run.manifest.experiment.weight_dtype
    floors = [None if chip is None else step_floor(time, chip, dtype) for time in times]
    return [None if floor is None or floor.floor_s <= 0 else floor for floor in floors]


def bounds_document(run: RunRecord, source: Source) -> dict[str, Any]:
    """The floor of each phase of one source, and the bounds of its parts; empty if no step is modeled."""
    chip, dtype = run.manifest.experiment.chip, run.manifest.experiment.weight_dtype
    times = run.times_of(source)
    floors = zip(times, _floors(run, times), strict=True)
    of_phases = {time.phase.value: to_plain(floor) for time, floor in floors if floor is not None}
    document: dict[str, Any] = {"floor": of_phases} if of_phases else {}
    if chip is not None and times:
        bounds = {t.phase.value: roofline_bounds(t, chip, dtype) for t in times}
        document["roofline"] = {phase: list(map(asdict, of)) for phase, of in bounds.items()}
    return document


def roofline_lines(run: RunRecord) -> Iterator[RenderableType]:
    """What binds each step in a sentence, then a table for each modeled step."""
    chip, tables = run.manifest.experiment.chip, list(roofline_tables(run))
    if chip is None or not any(one.rows for one in tables):
        yield Text("no roofline: no step of this run is modeled", style="yellow")
        return
    whys = list(why_sentences(run).values())
    parts = (bullets(whys), *(bullets([reason]) for reason in reasons_in(whys)))
    yield from with_first_block(parts, Text(""))
    yield Text("")
    for one in tables:
        yield rich_table(one)
        yield Text("")
    peaks = "bounds of one device: FLOPs, HBM bytes and wire bytes at the peaks of "
    yield Text(f"{peaks}{chip.name}: {chip.source}", style="dim")


def roofline_tables(run: RunRecord) -> Iterator[ViewTable]:
    """The lower bounds of each part of each modeled step, and which binds it; none without the chip's peaks."""
    chip, dtype = run.manifest.experiment.chip, run.manifest.experiment.weight_dtype
    seconds = ("compute\nbound_s", "HBM\nbound_s", "link\nbound_s", "modeled_s")
    others = ("bound /\nmodeled#", "bound by#", "over the\nnext bound#")
    if chip is None:
        return
    for time in run.times:
        cells = list[tuple[CellValue, ...]]()
        for bound in roofline_bounds(time, chip, dtype):
            factor = bound.factor or 0.0
            lead = f"{factor:.1f}" if factor < MAX_FACTOR else f">{MAX_FACTOR}"
            share = "overlaps" if bound.roof_frac is None else f"{bound.roof_frac:.0%}"
            times = (bound.compute_s, bound.hbm_s, bound.interconnect_s, bound.taken_s)
            by = RESOURCES[bound.binding]
            cells.append((bound.part, *times, share, by, "" if bound.factor is None else lead))
        yield table((f"{time.phase}, {time.source}", *seconds, *others), cells)
