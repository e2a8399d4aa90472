"""The page of a search: the winner with its reasons, the Pareto front, and what was searched."""

from collections.abc import Iterator, Sequence

from meshscope.events.enums import REQUEST_PHASES, Phase
from meshscope.events.step_time import TimeEstimate
from meshscope.reports import plan as texts
from meshscope.reports.answer import fit_of
from meshscope.reports.charts.cost import front_chart, time_breakdown
from meshscope.reports.html import blocks
from meshscope.reports.html.page import blocks_html
from meshscope.reports.html.run import MAX_COMMAND, fit_bar, sentence
from meshscope.reports.html.sections import waterfall_blocks
from meshscope.reports.model import short, table
from meshscope.reports.slices import slice_notes
from meshscope.reports.times import time_figure
from meshscope.serving.grid import TOO_LARGE
from meshscope.serving.launch import launches_of
from meshscope.serving.search import Choice, PlanSearch, VerifiedChoice, WonBy, interval_of
from meshscope.serving.slices import SliceSearch, slice_name
from meshscope.units import format_dtype

_TIMES = ("TTFT_s", "TPOT_s", "request_s")
_RATE = "request tokens/s per chip"


def plan_html(
    search: PlanSearch, slices: SliceSearch | None = None, verified: Sequence[VerifiedChoice] = ()
) -> str:
    """The page as one HTML file; for several slices, the best one."""
    workload = search.space.workload
    model, slice_ = search.space.model.name, slice_name(search.space.topology)
    if search.winner is not None:
        headline = f"{search.winner.experiment.plan} serves {model} best on {slice_}"
    elif search.closest is not None:
        headline = f"No plan of {model} on {slice_} meets {texts.limits_text(search)}"
    elif TOO_LARGE in search.n_refused:
        headline = f"{model} does not fit {slice_}"
    else:
        headline = f"No plan of {model} is left on {slice_}"
    lead = f"Prompt {workload.prompt}, output {workload.output}; best for {texts.goal_text(search)}"
    return blocks_html(headline, _blocks(search, slices, verified), lead=lead)


def _blocks(
    search: PlanSearch, slices: SliceSearch | None, verified: Sequence[VerifiedChoice]
) -> Iterator[blocks.Block]:
    best = search.winner or search.closest
    if best is None:
        yield blocks.paragraph(sentence(texts.nothing_left_text(search)), "banner bad")
    if search.winner is None and search.closest is not None:
        yield blocks.paragraph(sentence(f"it takes {texts.exceeded_text(search)}"), "banner bad")
        yield blocks.paragraph(sentence(texts.needed_text(search)), "say")
    if best is not None:
        yield blocks.paragraph(texts.choice_name(best), "heading")
        yield blocks.tiles(_tiles(search, best))
        yield fit_bar(fit_of(best.memory), best.memory)
    yield from blocks.descriptions(
        (name, text and sentence(text)) for name, text in _reasons(search)
    )
    near = () if search.closest is None else (search.closest, *search.fastest)
    shown = search.front or near
    others = tuple(choice for choice in search.best if choice not in search.front)
    if shown:
        yield front_chart(search, shown, others)
    if search.won_by is not None:
        yield from _against(search.won_by, search)
    yield from _verified(verified)
    if slices is not None:
        yield _slices(slices)
    yield from blocks.fold(
        "Without quantization, and prefill and decode apart", blocks.descriptions(_apart(search))
    )
    if shown:
        yield _choices("front", "Pareto front" if search.front else "Closest", shown)
    if others:
        of_others = _choices("plans", "Best choice of other plans", others)
        yield from blocks.fold("The best choice of other plans", [of_others])
    if search.winner is not None:
        launches = launches_of(search.winner.experiment, search.space.n_first_layers)
        flags = (
            (one.server, "", "; ".join(missing), short(one.command, MAX_COMMAND))
            for one in launches
            for missing in [map("not expressed: {}".format, one.not_expressed)]
        )
        yield from blocks.fold("How to start it", blocks.advice(flags, "Launch flags"))
    notes = (*map(sentence, texts.count_texts(search)), *texts.search_notes(search))
    yield from blocks.fold("What was searched, and assumed", map(blocks.paragraph, notes))


def _tiles(search: PlanSearch, choice: Choice) -> Iterator[tuple[str, str, str]]:
    for name, phase, seconds in (
        ("TTFT", Phase.PREFILL, choice.ttft_s),
        ("TPOT", Phase.DECODE, choice.tpot_s),
    ):
        plain = TimeEstimate(value_s=seconds, low_s=None, high_s=None)
        figure = time_figure(interval_of(search.times, phase) or plain)
        note = f"{'no interval' if figure.low is None else figure.range_text}; predicted"
        yield name, figure.text, note
    rate = f"{choice.tokens_per_s_per_chip:,.0f}"
    yield "Request tokens/s per chip", rate, "of a batch over its prefill and all decode steps"


def _reasons(search: PlanSearch) -> Iterator[tuple[str, str]]:
    if search.equals:
        yield "equal", texts.equals_text(search)
    yield from ((phase.value, text) for phase, text in search.why.items())
    if search.winner is not None:
        yield "format", texts.conversion_text(search)
    if search.won_by is not None:
        yield texts.won_by_title(search), search.won_by.sentence
    if search.placements is not None:
        yield "placement", texts.placement_text(search.placements)


def _choices(id_: str, title: str, choices: Sequence[Choice]) -> blocks.Block:
    names = ("plan", "batch#", "weights", "cache", "chunk#", *_TIMES, f"{_RATE}#")
    view = table(
        (*names, "memory of a device_gib", "fits"),
        (
            (
                str(choice.experiment.plan),
                workload.batch,
                format_dtype(workload.weight_dtype),
                format_dtype(workload.cache_dtype),
                workload.prefill_chunk,
                *(choice.ttft_s, choice.tpot_s, choice.e2e_s),
                choice.tokens_per_s_per_chip,
                fit_of(choice.memory).known,
                choice.memory.fit.value,
            )
            for choice in choices
            for workload in [choice.experiment.workload]
        ),
        title=title,
    )
    return blocks.page_table(id_, view, row_classes=["best"] if id_ == "front" else [])


def _against(won_by: WonBy, search: PlanSearch) -> Iterator[blocks.Block]:
    """Where the request of the runner-up takes other time, at the winner's batch and precision."""
    if len(won_by.times) < 2 or search.winner is None:
        return
    names = [str(c.experiment.plan) for c in (search.winner, won_by.runner_up)]
    sides = [{time.phase: time_breakdown(time) for time in times} for times in won_by.times]
    yield from waterfall_blocks(
        list(zip(names, sides, strict=True)),
        n_decode_steps=search.space.workload.n_decode_steps,
        table_id="against",
    )


_LATENCIES = ("ttft_s", "tpot_s")


def _verified(verified: Sequence[VerifiedChoice]) -> Iterator[blocks.Block]:
    if not verified:
        return
    times = (f"{n}, {source}_s" for n in ("TTFT", "TPOT") for source in ("compiled", "predicted"))
    view = table(
        ("plan", *times, f"{_RATE}#", "fits", *map("{}, missed".format, REQUEST_PHASES), "run"),
        (
            (
                texts.choice_name(one.choice),
                *(getattr(of, n, None) for n in _LATENCIES for of in (one.compiled, one.choice)),
                getattr(one.compiled, "tokens_per_s_per_chip", None),
                {True: "yes", False: "NO", None: "unknown"}[
                    one.compiled and one.compiled.memory.fits
                ],
                *(one.failure or missed.get(phase) for phase in REQUEST_PHASES),
                one.folder,
            )
            for one in verified
            for missed in [{miss.phase: sentence(texts.miss_sentence(miss)) for miss in one.misses}]
        ),
        title="Compiled, best first",
    )
    yield blocks.page_table("verified", view)


def _slices(slices: SliceSearch) -> blocks.Block:
    names = (
        *("slice", "chips#" if slices.prices is None else "price an hour#"),
        *(("meets the objective",) if slices.has_limits else ()),
        *("best plan", "TTFT_s", "TPOT_s", f"{_RATE}#"),
        *(() if slices.prices is None else ("price per million output tokens#",)),
    )
    figures = (*_LATENCIES, "tokens_per_s_per_chip")
    rows = (
        (
            slice_name(search.space.topology),
            slices.price(search),
            *(("no" if search.winner is None else "yes",) if slices.has_limits else ()),
            "does not fit" if choice is None else texts.choice_name(choice),
            *(getattr(choice, name, None) for name in figures),
            *(() if slices.prices is None else (slices.price_per_million(search),)),
        )
        for search in slices.searches
        for choice in [search.winner or search.closest]
    )
    notes = map("{}.".format, slice_notes(slices))
    view = table(names, rows, title="Slices", notes=notes)
    best = ["best" if search is slices.best else "" for search in slices.searches]
    return blocks.page_table("slices", view, row_classes=best)


def _apart(search: PlanSearch) -> Iterator[tuple[str, str]]:
    """Prefill and decode on slices of their own, and the best without quantization."""
    named = {"own format": search.own_format, "without quantization": search.unquantized}
    if search.apart is not None:
        named |= {"prefill apart": search.apart.prefill, "decode apart": search.apart.decode}
    yield from ((name, texts.figures_text(one)) for name, one in named.items() if one is not None)
