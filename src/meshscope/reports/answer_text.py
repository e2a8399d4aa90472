"""The answer of a run, and of two runs side by side, as the first lines of terminal output."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.analysis.join import Agreement
from meshscope.analysis.roofline import main_costs
from meshscope.events.enums import Phase, Source
from meshscope.reports.answer import (
    UNTIMED,
    Answer,
    Fit,
    FitState,
    SourceAgreement,
    SourceAnswer,
)
from meshscope.reports.model import EMPTY_LABEL, UNKNOWN_LABEL, Figure, short
from meshscope.reports.tables import COLUMNS, bullets, fits_first_block, labeled, with_first_block
from meshscope.store.run import ServedFigures
from meshscope.units import format_rate

NO_ROOM = "no batch"
_FIT_STYLES = {
    FitState.YES: "green",
    FitState.NO: "bold red",
    FitState.CLOSE: "yellow",
    FitState.UNKNOWN: "yellow",
}


class _Detail(NamedTuple):
    """How much of an answer is shown: numbers of sentences, or whether a part is."""

    suggestions: int = 0
    has_room: bool = False
    tips: int = 0  # notes that say what else to try
    has_chunks: bool = True  # whether tips name other chunks, which gain less than a suggestion
    basis: int = 2  # what widens intervals
    has_folder: bool = True
    meanings: int = 2  # of reasons: what the device does, and what changes it
    whys: int = 2
    has_own_program: bool = True  # its memory, next to a server's


# From most of an answer to the least of it; the first that fits is shown. What changes a reason in general gives way to
# a suggestion with its gain, and so do the second reason and other tips.
_DETAILS = (
    *(_Detail(n, has_room=True, tips=3, meanings=m) for n in (2, 1) for m in (2, 1)),
    *(_Detail(1, tips=3, meanings=m) for m in (2, 1)),
    *(_Detail(1, tips=3, meanings=m, has_chunks=False) for m in (2, 1)),
    *(_Detail(1, tips=3, meanings=0, has_chunks=has) for has in (True, False)),
    *(_Detail(1, tips=3, meanings=0, has_chunks=False, basis=0, whys=n) for n in (2, 1)),
    *(
        _Detail(n, tips=tips, basis=basis, meanings=m, whys=whys, has_own_program=has)
        for n, tips, whys in ((0, 3, 2), (0, 2, 2), (0, 1, 2), (1, 0, 1), (0, 0, 2))
        for basis in (2, 0)
        for m, has in ((2, True), (1, True), (1, False), (0, True))
    ),
    _Detail(basis=0, has_folder=False, meanings=0),
    _Detail(basis=0, has_folder=False, meanings=0, whys=1),
)


def answer_lines(
    answer: Answer, *, is_full: bool = False, others: Sequence[str] = ("--rows", "--full")
) -> Sequence[RenderableType]:
    """What was asked, the figures of every source, whether they agree, what binds, and what to try.

    `others` are the options that show more; a line more follows without them. To fit into its lines, it drops secondary
    costs, the room of several sources, suggestions, and at last notes, which it counts. An empty line comes before what
    is still too long, and `is_full` drops nothing.
    """
    if is_full:
        lines = _detailed_lines(answer, _DETAILS[0], is_full=True)
        return list(with_first_block(lines, Text("")))
    for detail in _DETAILS:
        lines = list(_detailed_lines(answer, detail, others))
        if fits_first_block(lines, is_last=bool(others)):
            return lines
    for n_shown in reversed(range(len(answer.notes))):
        counted = f"and {len(answer.notes) - n_shown} more with --full"
        shorter = replace(answer, notes=(*answer.notes[:n_shown], counted))
        lines = list(_detailed_lines(shorter, _DETAILS[-1], others))
        if fits_first_block(lines, is_last=bool(others)):
            return lines
    # What was asked takes many lines.
    least = _detailed_lines(replace(answer, notes=()), _DETAILS[-2])
    return list(with_first_block(least, Text("")))


def _detailed_lines(
    answer: Answer, detail: _Detail, others: Sequence[str] = (), *, is_full: bool = False
) -> Iterator[RenderableType]:
    sources, (*weaker, strongest) = answer.sources, answer.sources
    if len(weaker) > 1 and not any(one.ttft.value or one.tpot.value for one in weaker):
        sources = (strongest,)  # two weaker ones without times
    source = f" ({answer.strongest.source})" if len(sources) == 1 else ""
    title, request = short(answer.title), short(answer.request)
    separator = ", " if len(f"{title}, {request}{source}") <= COLUMNS else "\n"
    rest = f"{separator}{request}{source}" if request else source
    yield Text.assemble((title, "bold"), rest)
    columns = {figures.source.value: figures for figures in sources}
    untimed = [note for note in answer.notes if note.startswith(UNTIMED) and len(sources) == 1]
    why_untimed = untimed[0].removeprefix(UNTIMED) if untimed else None
    yield answer_table(
        columns,
        has_room=detail.has_room,
        why_untimed=why_untimed,
        served=answer.served,
        has_own_program=detail.has_own_program,
    )
    for agreement in answer.agreements:
        yield from agreement_lines(agreement)
    if answer.traffic:
        yield Text(answer.traffic)
    costs = list(answer.why.values())
    why = costs if is_full else list(main_costs(costs, n_meanings=detail.meanings))[: detail.whys]
    tips = [note for note in answer.notes if note.startswith("try ")]
    tips.sort(key=lambda tip: "--topology" in tip)  # what the run gains where it is comes first
    weaker = [tip for tip in tips if "--prefill-chunk" in tip and answer.suggestions]
    dropped = {*untimed, *tips[detail.tips :], *(() if detail.has_chunks else weaker)}
    notes = [note for note in answer.notes if note not in dropped]
    if why or notes:
        yield bullets(map(short, (*why, *notes)))
    if suggestions := answer.suggestion_sentences[: detail.suggestions]:
        yield bullets(map(short, suggestions), "cyan")
    words = [f"basis: {one}" for one in answer.basis[:1]]
    words += answer.basis[1 : 1 + detail.basis]
    words += [f"run {short(answer.folder)}"] if answer.folder and detail.has_folder else []
    words += [", ".join(others)] if others else []
    if words:
        yield Text("; ".join(map(short, words)), "dim")


def answer_table(
    columns: Mapping[str, SourceAnswer],
    *,
    has_room: bool = True,
    why_untimed: str | None = None,
    served: ServedFigures | None = None,
    has_own_program: bool = True,
) -> Table:
    """One column of figures for each name: step times or why they are unknown, throughput, and memory.

    `served` is what a server delivers, whose memory comes before our own program's, or in its place.
    """
    sources = list(columns.values())
    names = [] if len(columns) == 1 else [("", *(Text(short(n), style="dim") for n in columns))]
    unknown = [("times", short(f"{UNKNOWN_LABEL}: {why_untimed}"))]
    times = _time_rows(sources) if why_untimed is None else unknown
    # With the batch, which the request has, in flight.
    served_rows = [] if served is None else [("as served", str(served).partition(": ")[2])]
    label = "fits"
    if served is not None and served.fits is not None:
        served_rows, label = [*served_rows, ("fits", served.fits)], "own program"
    is_shown = label == "fits" or has_own_program
    fits = _fit_rows(sources, has_room=has_room, label=label) if is_shown else ()
    return labeled([*names, *times, *served_rows, *fits])


def _time_rows(sources: Sequence[SourceAnswer]) -> Iterator[tuple[str | Text, ...]]:
    def row(label: str, name: str) -> tuple[str | Text, ...]:
        """`257 ms (214 to 311 ms)` of each source; a note says why a modeled time has no interval."""
        cells: list[str | Text] = [label]
        for one in sources:
            figure: Figure = getattr(one, name)
            is_missing = one.source is not Source.MEASURED and figure.value is not None
            missing = " (no interval)" if is_missing else ""
            interval = missing if figure.low is None else f" ({figure.range_text})"
            cells.append(Text.assemble((figure.text, "bold"), interval))
        return tuple(cells)

    phases = {phase for one in sources for phase in one.phases}
    has_decode, has_tpot = (
        any(getattr(one, name).value is not None for one in sources) for name in ("decode", "tpot")
    )
    is_verification = has_decode and not has_tpot
    if is_verification:
        yield row("decode step", "decode")
    elif phases != {Phase.STEP}:
        yield row("TTFT, prefill", "ttft")
    if Phase.STEP in phases:
        yield row("step", "step")
    if Phase.DECODE in phases and not is_verification:
        yield row("TPOT, decode", "tpot")
        # Several columns have no room for the word in each.
        is_single = len(sources) == 1
        unit = "decode tokens/s" if is_single else "tokens/s"
        rates: list[str] = []  # `1,462 decode tokens/s, 183 per chip`
        for one in sources:
            per_chip = one.decode_tokens_per_s_per_chip.value
            tail = "" if per_chip is None else f", {format_rate(per_chip)} per chip"
            rates.append(one.decode_tokens_per_s.text.replace("tokens/s", f"{unit}{tail}"))
        yield ("throughput" if is_single else "decode rate", *map(Text, rates))


def _fit_rows(
    sources: Sequence[SourceAnswer], *, has_room: bool, label: str
) -> Iterator[tuple[str | Text, ...]]:
    room = [room_text(one.fit) for one in sources]
    fits = [
        Text(EMPTY_LABEL) if fit is None else Text(fit.text, style=_FIT_STYLES[fit.memory.fit])
        for fit in (one.fit for one in sources)
    ]
    single = sources[0].fit if len(sources) == 1 else None
    if single is not None and room[0]:
        memory, words = single.memory, f"room for {room[0]}"
        if room[0] == NO_ROOM and memory.has_assumed_weights:
            words = memory.fit_reason or "room unknown"
        elif room[0] == NO_ROOM:
            words = "no batch surely fits" if memory.fit is FitState.CLOSE else "no batch fits"
        is_part = memory.fit is FitState.UNKNOWN and memory.total_bytes is None
        is_least = is_part and not memory.has_assumed_weights
        without = " without temporaries" if is_least else ""
        yield label, fits[0].append(f"{without}, {words}", "default")
        return
    if any(one.fit for one in sources):
        yield (label, *fits)
    if has_room and any(room):
        yield ("room for", *room)


def room_text(fit: Fit | None) -> str:
    """`batch 324 or context 5,888`: the largest that fit, each with the other as it is.

    They are upper bounds while a part of the memory is unknown.
    """
    if fit is None or fit.capacity is None:
        return ""
    sizes = {"batch": fit.capacity.largest_batch, "context": fit.capacity.largest_context}
    room = " or ".join(f"{name} {size:,}" for name, size in sizes.items() if size)
    if not room:
        return NO_ROOM
    return f"{'at most ' if fit.memory.total_bytes is None else ''}{room}{fit.padding}"


def agreement_lines(agreement: SourceAgreement) -> Iterator[RenderableType]:
    """The verdict on the collectives and its findings, then the verdict on the times."""
    if agreement.agreement is Agreement.EQUAL and agreement.is_time_within:
        line = f"{agreement.collectives}; times agree within their intervals"
        yield Text(line if len(line) <= COLUMNS else line.replace("their ", ""), "bold green")
        return
    yield from collectives_lines(agreement.collectives, agreement.agreement)
    style = "bold green" if agreement.is_time_within else "bold red"
    yield from (Text(f"times: {short(s)}", style=style) for s in agreement.time_sentences)


def collectives_lines(verdict: str, agreement: Agreement) -> Iterator[RenderableType]:
    """A verdict on collectives, and its findings below it."""
    head, *findings = verdict.split("; ")
    styles = {Agreement.EQUAL: "bold green", Agreement.SAME_MEANING: "bold yellow"}
    yield Text(short(head), style=styles.get(agreement, "bold red"))
    yield from (bullets([short(finding)]) for finding in findings)
