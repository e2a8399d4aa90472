"""The top of the page of a run: warnings, its figures, whether it fits, why, and what to try."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshscope.analysis.comparison import runs_on_cpu
from meshscope.analysis.join import Agreement
from meshscope.analysis.totals import step_totals
from meshscope.planner.suggestions import Suggestion
from meshscope.plans.memory import Memory, TempBasis
from meshscope.reports.answer import Fit, FitState, SourceAnswer, change_with_purpose
from meshscope.reports.html.blocks import (
    Advice,
    Advices,
    BarSegment,
    Block,
    DescriptionList,
    FitBar,
    Paragraph,
    Tile,
    Tiles,
    page_table,
)
from meshscope.reports.html.page_run import PageRun
from meshscope.reports.live import SHARED_CORES
from meshscope.reports.model import Figure, Unit, joined
from meshscope.reports.plain import short
from meshscope.reports.summary import memory_segments
from meshscope.reports.trace import capture_sentence, is_trace, trace_tables
from meshscope.reports.words import counted, phase_label
from meshscope.units import format_bytes, format_seconds

MAX_SENTENCE = 400  # characters
MIN_SEGMENT_BYTES = 2**30 / 200  # smaller parts of the memory are 0.00 GiB
MIN_GAIN_FRAC = 0.01  # of a time; smaller changes of it are not named
FIT_HEADS = {
    FitState.YES: "Fits",
    FitState.NO: "Does not fit",
    FitState.CLOSE: "Close to the limit",
    FitState.UNKNOWN: "Fit unknown",
}
ESTIMATED = "Temporaries are estimated; the compiler knows them."
FIT_CLASSES = {FitState.YES: "good", FitState.NO: "bad"}
SEGMENT_CLASSES = {
    "weights": "c-compute",
    "KV cache": "ax1",
    "arguments": "c-compute",
    "outputs": "ax1",
    "temporaries": "c-stages",
    "other": "c-idle",
}


def hero_blocks(run: PageRun) -> Iterator[Block]:
    """Warnings, then the figures, the memory, the reasons and the suggestions.

    For an imported trace, what the capture lacks comes first, then its tables.
    """
    if is_trace(run.run):
        yield from _trace_blocks(run)
        return
    yield from (Paragraph(text=text, class_name=style) for text, style in warnings(run))
    if run.costs:
        yield Tiles(tiles=tuple(_tiles(run)))
    else:
        yield from (Paragraph(text=text, class_name="say") for text in _bytes_sentences(run))
    yield from _fit_bars(run)
    yield from _agreements(run)
    why = tuple((phase.value, sentence(text)) for phase, text in run.answer.why.items())
    if why:
        yield DescriptionList(pairs=why)
    yield from advices(run)


def _trace_blocks(run: PageRun) -> Iterator[Block]:
    """The quality of the capture, its steps and its collectives."""
    measured = run.run.measured
    assert measured is not None
    assert measured.trace is not None
    yield Paragraph(text=sentence(capture_sentence(measured.trace)), class_name="lead")
    for finding in measured.findings:
        yield Paragraph(text=sentence(finding), class_name="banner")
    for number, table in enumerate(trace_tables(run.run)):
        title = f"{table.title[:1].upper()}{table.title[1:]}"
        yield page_table(run.html_id(f"trace{number}"), replace(table, title=title))


def warnings(run: PageRun) -> Iterator[tuple[str, str]]:
    """(sentence, CSS class) of everything that a reader must know before the figures."""
    fit = run.answer.strongest.fit
    if fit is not None and fit.state is FitState.NO:
        largest = (
            "" if not fit.largest_batch else f" The largest batch that fits: {fit.largest_batch:,}."
        )
        yield (
            f"Does not fit: a device needs {fit.text.partition(': ')[2]} of HBM.{largest}",
            "banner bad",
        )
    for note in run.answer.notes:
        yield sentence(note), "banner"
    for agreement in run.answer.agreements:
        if agreement.agreement is not Agreement.EQUAL:
            style = "banner" if agreement.agreement is Agreement.SAME_MEANING else "banner bad"
            yield sentence(agreement.collectives), style
        if agreement.is_time_within is False:
            sentences = (text for text in agreement.time_sentences if "within" not in text)
            yield " ".join(map(sentence, sentences)), "banner bad"
    if run.costs and runs_on_cpu(run.run):
        yield sentence(SHARED_CORES), "banner"


def _agreements(run: PageRun) -> Iterator[Paragraph]:
    """One line for each pair of sources that agree in collectives and in times."""
    for agreement in run.answer.agreements:
        if agreement.agreement is Agreement.EQUAL and agreement.is_time_within is not False:
            times = (f"times of {text}" for text in agreement.time_sentences)
            text = sentence("; ".join([agreement.collectives, *times]))
            yield Paragraph(text=text, class_name="verdict is-equal")


def sentence(text: str) -> str:
    """The text as a sentence: with a capital letter and a full stop."""
    whole = short(text, MAX_SENTENCE)
    return f"{whole[:1].upper()}{whole[1:].removesuffix('.')}."


def _tiles(run: PageRun) -> Iterator[Tile]:
    """TTFT, TPOT and decode tokens/s per chip, each with its interval and source."""
    timed, latency = run.timed, run.inputs.latency
    spreads = (None, None) if latency is None else (latency.ttft, latency.tpot)
    for (name, figure), spread in zip(
        (("TTFT", timed.ttft), ("TPOT", timed.tpot)), spreads, strict=True
    ):
        note = f"{_interval(figure)}{timed.source}"
        if spread is not None:
            note = f"measured, mean of {spread.n}; p99 {format_seconds(spread.p99_s)}"
        if figure.value is not None:
            yield Tile(name=name, value=figure.text, note=note)
    rate = timed.decode_tokens_per_s_per_chip
    if rate.value is not None:
        number = rate.text.removesuffix(" tokens/s")
        note = f"{_rate_interval(timed)}while all sequences decode"
        yield Tile(name="Decode tokens/s per chip", value=number, note=note)


def _interval(figure: Figure) -> str:
    return "" if figure.low is None or figure.high is None else f"{figure.range_text}; "


def _rate_interval(timed: SourceAnswer) -> str:
    """The rate at both ends of the interval of the decode step."""
    step, rate = timed.decode, timed.decode_tokens_per_s_per_chip
    if not (step.value and step.low and step.high and rate.value):
        return ""
    low, high = (rate.value * step.value / end_s for end_s in (step.high, step.low))
    return _interval(Figure(value=rate.value, unit=Unit.NUMBER, low=round(low), high=round(high)))


def _fit_bars(run: PageRun) -> Iterator[FitBar]:
    """The memory of the strongest source that knows one."""
    known = [(s.fit, run.run.memory[s.source]) for s in run.answer.sources if s.fit is not None]
    for fit, memory in known[-1:]:
        rooms = () if fit.state is FitState.NO else (_room(other) for other, _ in known)
        room = next(filter(None, rooms), "")
        yield fit_bar(fit, memory, room=room)


def fit_bar(fit: Fit, memory: Memory, *, room: str = "") -> FitBar:
    """The memory of one device; `room` says how much more fits."""
    segments = memory_segments(memory)
    widest = max(sum(n for _, n in segments), memory.hbm_bytes or 0, 1)
    return FitBar(
        text=f"{FIT_HEADS[fit.state]}: {fit.text.partition(': ')[2]}{' of HBM' if memory.hbm_bytes else ''}",
        class_name=FIT_CLASSES.get(fit.state, ""),
        segments=tuple(_segments(segments, widest)),
        limit=None if memory.hbm_bytes is None else 100 * memory.hbm_bytes / widest,
        note=" ".join(filter(None, (_reason(fit), room))),
    )


def _segments(parts: Iterable[tuple[str, float]], widest: float) -> Iterator[BarSegment]:
    start = 0.0
    for name, n_bytes in parts:
        if n_bytes < MIN_SEGMENT_BYTES:
            continue
        yield BarSegment(
            name=f"{name} {n_bytes / 2**30:.2f} GiB",
            start=100 * start / widest,
            width=100 * n_bytes / widest,
            class_name=SEGMENT_CLASSES[name],
        )
        start += n_bytes


def _reason(fit: Fit) -> str:
    if fit.reason is not None:
        return sentence(fit.reason)
    return ESTIMATED if fit.known.basis == TempBasis.ESTIMATE else ""


def _room(fit: Fit) -> str:
    """The largest batch, or the largest context, that fits; nothing if unknown."""
    named = (("batch", fit.largest_batch), ("context", fit.largest_context))
    sizes = [f"{name} {size:,}" for name, size in named if size]
    return f"Room for {', or '.join(sizes)}." if sizes else ""


def advices(
    run: PageRun, follow_ups: Iterable[tuple[str, Suggestion]] | None = None
) -> Iterator[Advices]:
    """The changes with the largest predicted gains over a run, to it or to others by name; nothing without any."""
    changes = [("", s) for s in run.answer.suggestions] if follow_ups is None else follow_ups
    every = tuple(
        Advice(
            change=short(change_with_purpose(s) + (f", from {name}" if name else "")),
            gain=joined(list(_gains(run, s))),
            reason=sentence(s.reason) if s.reason else "",
            command=short(s.command, 2000),
        )
        for name, s in changes
    )
    if every:
        yield Advices(advices=every)


def _gains(run: PageRun, suggestion: Suggestion) -> Iterator[str]:
    """`request -1.2 s`, `TTFT -120 ms`, `TPOT +0.4 ms`, `decode tokens/s +31%`."""
    for name, seconds, figure in (
        ("request", suggestion.request_gain_s, run.timed.e2e),
        ("TTFT", suggestion.ttft_gain_s, run.timed.ttft),
        ("TPOT", suggestion.tpot_gain_s, run.timed.tpot),
    ):
        if seconds and figure.value and abs(seconds) >= MIN_GAIN_FRAC * figure.value:
            yield f"{name} {'-' if seconds > 0 else '+'}{format_seconds(abs(seconds))}"
    if abs(suggestion.tokens_per_s_frac or 0.0) >= MIN_GAIN_FRAC:
        yield f"decode tokens/s {suggestion.tokens_per_s_frac:+.0%}"


def _bytes_sentences(run: PageRun) -> Iterator[str]:
    """The bytes that a device sends, for runs without times."""
    totals = step_totals(run.run.rows_of(run.source))
    if not totals and not run.run.open_operations:
        yield "No communication: the run has no collectives."
    for phase, total in totals.items():
        sent, count = format_bytes(total.wire_bytes), counted(total.count, "collective")
        yield f"Each device sends {sent} in {count} per {phase_label(phase)} step."
    yield "The step time is unknown: nothing was measured or modeled."
