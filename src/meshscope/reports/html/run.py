"""A run on a page with its answer and metrics, and the top of its page: warnings, figures, fit, why, what to try."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import polars as pl

from meshscope.analysis import catalog
from meshscope.analysis.comparison import runs_on_cpu
from meshscope.analysis.join import Agreement
from meshscope.analysis.totals import step_totals
from meshscope.events.enums import Phase, Source
from meshscope.plans.memory import TempBasis
from meshscope.reports.answer import (
    Answer,
    Fit,
    FitState,
    SourceAnswer,
    answer_of,
    change_with_purpose,
    gains_text,
)
from meshscope.reports.answer_text import NO_ROOM, room_text
from meshscope.reports.charts.cost import Breakdown, CostBar, cost_bars
from meshscope.reports.html.blocks import Block, advice, descriptions, page_table, paragraph, tiles
from meshscope.reports.measured import SHARED_CORES, capture_sentence, trace_tables
from meshscope.reports.metrics import metric_table, prefill_first
from meshscope.reports.model import Figure, Unit, short
from meshscope.reports.ranking import RankedRun
from meshscope.reports.summary import memory_segments
from meshscope.reports.words import phase_label, traffic_text
from meshscope.serving.suggestions import Suggestion
from meshscope.units import format_seconds

MAX_NAME, MAX_SENTENCE, MAX_COMMAND = 80, 400, 2000  # characters
MIN_SEGMENT_BYTES = 2**30 / 200  # smaller parts of the memory are 0.00 GiB
ESTIMATED = "Temporaries are estimated; the compiler knows them."
# The start of the sentence about the memory, and its CSS class.
FITS = {
    FitState.YES: ("Fits", "good"),
    FitState.NO: ("Does not fit", "bad"),
    FitState.CLOSE: ("Close to the limit", ""),
    FitState.UNKNOWN: ("Fit unknown", ""),
}
SEGMENT_CLASSES = {
    "weights": "c-compute", "KV cache": "ax1", "arguments": "c-compute", "outputs": "ax1",
    "temporaries": "c-stages", "other": "c-idle",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, so that it keeps what it derives
class PageRun(RankedRun):
    """One run on the page with its answer and metrics; `number` counts from 1."""

    number: int = 1
    shown: set[str] = field(default_factory=set)  # names of metrics that a section has asked for

    @cached_property
    def answer(self) -> Answer:
        """The answer of the run with suggestions."""
        return answer_of(self.run)

    @cached_property
    def inputs(self) -> catalog.MetricInputs:
        """What the metrics are computed from."""
        return catalog.metric_inputs(self.run)

    @cached_property
    def metrics(self) -> dict[str, catalog.Result]:
        """Every metric by name."""
        return catalog.metrics_of(self.inputs)

    @cached_property
    def costs(self) -> tuple[CostBar, ...]:
        """The steps of each phase and source, the strongest source last."""
        return cost_bars(self.inputs)

    @property
    def source(self) -> Source:
        """The strongest source of the run."""
        return self.run.manifest.source

    @cached_property
    def figures(self) -> tuple[SourceAnswer, ...]:
        """The figures of every source, the weakest first."""
        return self.answer.sources

    @property
    def strongest_costs(self) -> dict[Phase, CostBar]:
        """For each phase the step of the strongest source that has one."""
        return {bar.phase: bar for bar in self.costs}  # weaker sources come first

    @property
    def breakdowns(self) -> dict[Phase, Breakdown]:
        """The seconds of those steps by part of the model and axis."""
        return {phase: bar.breakdown for phase, bar in self.strongest_costs.items()}

    @property
    def n_decode_steps(self) -> int | None:
        """Decode steps of the request; None if unknown."""
        workload = self.run.manifest.experiment.workload
        return None if workload is None else workload.n_decode_steps

    def html_id(self, name: str) -> str:
        """An id that is unique on the page."""
        return f"{name}-{self.number}"

    def of_strongest(self, name: str) -> pl.DataFrame | None:
        """The rows of a metric for the strongest source that has some, prefill first; None if unavailable."""
        self.shown.add(name)
        result = self.metrics[name]
        if isinstance(result, catalog.Unavailable):
            return None
        if "source" in result.columns:
            sources = set(result["source"].unique())
            strongest = next((s for s in reversed(Source) if s.value in sources), self.source)
            result = result.filter(pl.col("source") == strongest.value)
        return prefill_first(result)

    def tables(self, name: str) -> list[Block]:
        """A metric as one table with the first paragraph of its definition; none without rows."""
        result = self.of_strongest(name)
        if result is None or result.is_empty():
            return []
        id_ = self.html_id(name.replace("_", "-"))
        metric = next(metric for metric in catalog.METRICS if metric.name == name)
        note = metric.definition.partition("\n\n")[0].replace("`", "")
        return [page_table(id_, metric_table(name, result, title=metric.title), note=note)]


def top_blocks(run: PageRun) -> Iterator[Block]:
    """Warnings, then the figures, the memory, the reasons and the suggestions.

    For an imported trace, what the capture lacks comes first, then its tables.
    """
    if (measured := run.run.measured) and measured.trace:
        yield paragraph(sentence(capture_sentence(measured.trace)), "lead")
        yield from (paragraph(sentence(finding), "banner") for finding in measured.findings)
        for number, table in enumerate(trace_tables(run.run)):
            title = f"{table.title[:1].upper()}{table.title[1:]}"
            yield page_table(run.html_id(f"trace{number}"), replace(table, title=title))
        return
    yield from (paragraph(text, style) for text, style in warnings(run))
    if run.costs:
        yield tiles(_figures(run))
    else:
        totals = step_totals(run.run.rows_of(run.source))
        if not totals and not run.run.open_operations:
            yield paragraph("No communication: the run has no collectives.", "say")
        for phase, total in totals.items():
            yield paragraph(sentence(f"{phase_label(phase)}: {traffic_text(total)}"), "say")
        yield paragraph("The step time is unknown: nothing was measured or modeled.", "say")
    known = [one.fit for one in run.answer.sources if one.fit is not None]
    for fit in known[-1:]:  # of the strongest source that knows one
        rooms = map(room_text, () if fit.memory.fit is FitState.NO else known)
        room = next((text for text in rooms if text not in {"", NO_ROOM}), "")
        yield fit_bar(fit, room=room and f"Room for {room}.")
    for agreement in run.answer.agreements:
        if agreement.agreement is Agreement.EQUAL and agreement.is_time_within is not False:
            times = (f"times of {text}" for text in agreement.time_sentences)
            said = sentence("; ".join([agreement.collectives, *times]))
            yield paragraph(said, "verdict is-equal")
    yield from descriptions((p.value, sentence(text)) for p, text in run.answer.why.items())
    yield from suggestions(("", suggestion) for suggestion in run.answer.suggestions)


def warnings(run: PageRun) -> Iterator[tuple[str, str]]:
    """(sentence, CSS class) of everything that a reader must know before the figures."""
    fit = run.answer.strongest.fit
    if fit is not None and fit.memory.fit is FitState.NO:
        text = f"Does not fit: a device needs {fit.amount} of HBM."
        if fit.capacity and fit.capacity.largest_batch:
            text += f" The largest batch that fits: {fit.capacity.largest_batch:,}."
        yield text, "banner bad"
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


def sentence(text: str) -> str:
    """The text as a sentence: with a capital letter and a full stop."""
    whole = short(text, MAX_SENTENCE)
    return f"{whole[:1].upper()}{whole[1:].removesuffix('.')}."


def _figures(run: PageRun) -> Iterator[tuple[str, str, str]]:
    timed, latency = run.timed, run.inputs.latency
    spreads = (None, None) if latency is None else (latency.ttft, latency.tpot)
    figures = {"TTFT": timed.ttft, "TPOT": timed.tpot}
    for (name, figure), spread in zip(figures.items(), spreads, strict=True):
        missing = "" if timed.source is Source.MEASURED else "no interval; "
        note = f"{_interval(figure) or missing}{timed.source}"
        if spread is not None:
            note = f"measured, mean of {spread.n}; p99 {format_seconds(spread.p99_s)}"
        if figure.value is not None:
            yield name, figure.text, note
    step, rate = timed.decode, timed.decode_tokens_per_s_per_chip
    if rate.value is not None:
        ends = ""
        if step.value and step.low and step.high:
            low, high = (round(rate.value * step.value / end_s) for end_s in (step.high, step.low))
            ends = _interval(Figure(value=rate.value, unit=Unit.NUMBER, low=low, high=high))
        number = rate.text.removesuffix(" tokens/s")
        yield "Decode tokens/s per chip", number, f"{ends}while all sequences decode"


def _interval(figure: Figure) -> str:
    return "" if figure.low is None or figure.high is None else f"{figure.range_text}; "


def fit_bar(fit: Fit, *, room: str = "") -> Block:
    """The memory of one device against its HBM, drawn without a script; `room` says how much more fits.

    Segments are (name, start, width, CSS class), in hundredths of the whole.
    """
    memory = fit.memory
    parts = memory_segments(memory)
    widest = max(sum(n for _, n in parts), memory.hbm_bytes or 0, 1)
    (head, style), start, segments = FITS[memory.fit], 0.0, list[tuple[str, float, float, str]]()
    for name, n in parts:
        if n >= MIN_SEGMENT_BYTES:
            text = f"{name} {n / 2**30:.2f} GiB"
            segments.append((text, 100 * start / widest, 100 * n / widest, SEGMENT_CLASSES[name]))
            start += n
    estimated = ESTIMATED if memory.temp_basis == TempBasis.ESTIMATE else ""
    reason = estimated if memory.fit_reason is None else sentence(memory.fit_reason)
    return {
        "block": "fit",
        "text": f"{head}: {fit.amount}{' of HBM' if memory.hbm_bytes else ''}",
        "style": style,
        "segments": segments,
        "limit": None if memory.hbm_bytes is None else 100 * memory.hbm_bytes / widest,
        "note": " ".join(filter(None, (reason, room))),
    }


def suggestions(changes: Iterable[tuple[str, Suggestion]]) -> Iterator[Block]:
    """The changes with the largest predicted gains, to a run or to others by name."""
    rows = list[tuple[str, str, str, str]]()
    for name, one in changes:
        change = short(change_with_purpose(one) + (f", from {name}" if name else ""))
        why = sentence(one.reason) if one.reason else ""
        rows.append((change, gains_text(one), why, short(one.command, MAX_COMMAND)))
    yield from advice(rows)
