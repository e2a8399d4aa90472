"""The page of a search: the winner with its reasons, the Pareto front, and what was left out and why."""

from collections.abc import Iterator, Sequence

from meshscope.events.enums import REQUEST_PHASES, Phase
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.planner.grid import TOO_LARGE
from meshscope.planner.launch import launches_of
from meshscope.planner.search import Choice, PlanSearch, WonBy, interval_of
from meshscope.planner.slices import SliceSearch, slice_name
from meshscope.planner.verified import VerifiedChoice
from meshscope.reports.answer import fit_of
from meshscope.reports.charts.cost import Breakdown, time_breakdown
from meshscope.reports.charts.points import front_chart
from meshscope.reports.html.blocks import (
    Advice,
    Advices,
    Block,
    DescriptionList,
    FoldedBlocks,
    PageTable,
    Paragraph,
    Tile,
    Tiles,
    fold,
    page_table,
)
from meshscope.reports.html.hero import fit_bar, sentence
from meshscope.reports.html.page import blocks_html
from meshscope.reports.html.times import waterfall_blocks
from meshscope.reports.model import Figure, Unit, ViewTable, figure_column, text_column
from meshscope.reports.plain import short
from meshscope.reports.plan import (
    choice_name,
    conversion_text,
    equals_text,
    exceeded_text,
    goal_text,
    limits_text,
    miss_sentence,
    needed_text,
    nothing_left_text,
    placement_text,
    search_notes,
    won_by_title,
)
from meshscope.reports.slices import slice_notes
from meshscope.reports.times import time_figure
from meshscope.units import format_dtype

DROPPED = "combinations dropped"
MAX_COMMAND = 2000  # characters


def plan_html(
    search: PlanSearch,
    slices: SliceSearch | None = None,
    verified: Sequence[VerifiedChoice] = (),
) -> str:
    """The page as one HTML file; with several slices, that of the best."""
    blocks = tuple(_blocks(search, slices, verified))
    return blocks_html(_headline(search), blocks, lead=_request(search))


def _headline(search: PlanSearch) -> str:
    model, slice_ = search.space.model.name, slice_name(search.space.topology)
    if search.winner is not None:
        return f"{search.winner.experiment.plan} serves {model} best on {slice_}"
    if search.closest is None:
        fits = TOO_LARGE not in search.n_refused
        return (
            f"No plan of {model} is left on {slice_}" if fits else f"{model} does not fit {slice_}"
        )
    return f"No plan of {model} on {slice_} meets {limits_text(search)}"


def _request(search: PlanSearch) -> str:
    workload = search.space.workload
    return f"Prompt {workload.prompt}, output {workload.output}; best for {goal_text(search)}"


def _blocks(
    search: PlanSearch, slices: SliceSearch | None, verified: Sequence[VerifiedChoice]
) -> Iterator[Block]:
    shown = search.winner or search.closest
    if shown is None:
        yield Paragraph(text=sentence(nothing_left_text(search)), class_name="banner bad")
    if search.winner is None and search.closest is not None:
        yield Paragraph(text=sentence(f"it takes {exceeded_text(search)}"), class_name="banner bad")
        yield Paragraph(text=sentence(needed_text(search)), class_name="say")
    if shown is not None:
        yield Paragraph(text=choice_name(shown), class_name="heading")
        yield Tiles(tiles=tuple(_tiles(search, shown)))
        yield fit_bar(fit_of(shown.memory), shown.memory)
    yield from _reasons(search)
    yield from _chart(search)
    if search.won_by is not None:
        yield from _against(search.won_by, search)
    yield from _verified(verified)
    if slices is not None:
        yield _slices(slices)
    yield from _apart(search)
    yield from _placements(search)
    yield _dropped(search)
    yield from _tables(search)
    if search.winner is not None:
        yield from fold("How to start it", [_launch(search.winner, search.space.n_first_layers)])
    for text in search_notes(search):
        yield Paragraph(text=text)


def _tiles(search: PlanSearch, choice: Choice) -> Iterator[Tile]:
    """TTFT, TPOT and the rate of the choice; the winner's times with intervals."""
    for name, phase, seconds in (
        ("TTFT", Phase.PREFILL, choice.ttft_s),
        ("TPOT", Phase.DECODE, choice.tpot_s),
    ):
        plain = TimeEstimate(value_s=seconds, low_s=None, high_s=None)
        figure = time_figure(interval_of(search.times, phase) or plain)
        note = "predicted" if figure.low is None else f"{figure.range_text}; predicted"
        yield Tile(name=name, value=figure.text, note=note)
    yield Tile(
        name="Request tokens/s per chip",
        value=f"{choice.tokens_per_s_per_chip:,.0f}",
        note="of a batch over its prefill and all decode steps",
    )


def _reasons(search: PlanSearch) -> Iterator[DescriptionList]:
    pairs = [(phase.value, sentence(text)) for phase, text in search.why.items()]
    if search.equals:
        pairs.insert(0, ("equal", sentence(equals_text(search))))
    if search.winner is not None and (text := conversion_text(search)):
        pairs.append(("format", sentence(text)))
    if search.won_by is not None:
        pairs.append((won_by_title(search), sentence(search.won_by.sentence)))
    if search.placements is not None:
        pairs.append(("placement", sentence(placement_text(search.placements))))
    if pairs:
        yield DescriptionList(pairs=tuple(pairs))


def _shown(search: PlanSearch) -> tuple[Choice, ...]:
    """The Pareto front; without one, the choice that comes closest and the fastest ones."""
    near = () if search.closest is None else (search.closest, *search.fastest)
    return search.front or near


def _others(search: PlanSearch) -> tuple[Choice, ...]:
    """The best choice of each plan that has another best choice than one of the front."""
    return tuple(choice for choice in search.best if choice not in search.front)


def _chart(search: PlanSearch) -> Iterator[Block]:
    shown = _shown(search)
    if shown:
        yield front_chart(search, shown, _others(search))


def _tables(search: PlanSearch) -> Iterator[Block]:
    """The choices of the chart with their figures."""
    shown, others = _shown(search), _others(search)
    if shown:
        yield _choices_table("front", "Pareto front" if search.front else "Closest", shown)
    if others:
        table = _choices_table("plans", "Best choice of other plans", others)
        yield from fold("The best choice of other plans", [table])


def _figures_text(choice: Choice) -> str:
    ttft, tpot = (
        Figure(value=seconds, unit=Unit.SECONDS).text for seconds in (choice.ttft_s, choice.tpot_s)
    )
    rate = f"{choice.tokens_per_s_per_chip:,.0f} request tokens/s per chip"
    return f"{choice_name(choice)}: TTFT {ttft}, TPOT {tpot}, {rate}"


def _choices_table(id_: str, title: str, choices: Sequence[Choice]) -> PageTable:
    view = ViewTable(
        title=title,
        columns=(
            text_column("plan"),
            figure_column("batch"),
            *map(text_column, ("weights", "cache")),
            figure_column("chunk"),
            *(figure_column(name, Unit.SECONDS) for name in ("TTFT", "TPOT", "request")),
            figure_column("request tokens/s per chip"),
            figure_column("memory of a device", Unit.MEMORY_BYTES),
            text_column("fits"),
        ),
        rows=tuple(
            (
                str(choice.experiment.plan),
                choice.experiment.workload.batch,
                format_dtype(choice.experiment.workload.weight_dtype),
                format_dtype(choice.experiment.workload.cache_dtype),
                choice.experiment.workload.prefill_chunk,
                *(choice.ttft_s, choice.tpot_s, choice.e2e_s),
                choice.tokens_per_s_per_chip,
                fit_of(choice.memory).known,
                choice.memory.fit.value,
            )
            for choice in choices
        ),
    )
    classes = ["best" if id_ == "front" and not at else "" for at in range(len(choices))]
    return page_table(id_, view, row_classes=classes)


def _against(won_by: WonBy, search: PlanSearch) -> Iterator[Block]:
    """Where the request of the runner-up takes other time, at the winner's batch and precision."""
    if len(won_by.times) < 2 or search.winner is None:
        return
    names = [str(c.experiment.plan) for c in (search.winner, won_by.runner_up)]
    sides = [_breakdowns(times) for times in won_by.times]
    yield from waterfall_blocks(
        list(zip(names, sides, strict=True)),
        n_decode_steps=search.space.workload.n_decode_steps,
        table_id="against",
    )


def _breakdowns(times: Sequence[StepTime]) -> dict[Phase, Breakdown]:
    return {time.phase: time_breakdown(time) for time in times}


def _verified(verified: Sequence[VerifiedChoice]) -> Iterator[Block]:
    """The compiled choices, and what the prediction of each missed."""
    if not verified:
        return
    view = ViewTable(
        title="Compiled, best first",
        columns=(
            text_column("plan"),
            *(
                figure_column(f"{name}, {source}", Unit.SECONDS)
                for name in ("TTFT", "TPOT")
                for source in ("compiled", "predicted")
            ),
            figure_column("request tokens/s per chip"),
            *map(text_column, ("fits", *(f"{phase}, missed" for phase in REQUEST_PHASES), "run")),
        ),
        rows=tuple(
            (
                choice_name(one.choice),
                *(one.ttft_s, one.choice.ttft_s, one.tpot_s, one.choice.tpot_s),
                one.tokens_per_s_per_chip,
                {True: "yes", False: "NO", None: "unknown"}[one.fits],
                *(one.failure or _missed(one, phase) for phase in REQUEST_PHASES),
                one.folder,
            )
            for one in verified
        ),
    )
    yield page_table("verified", view)


def _missed(verified: VerifiedChoice, phase: Phase) -> str | None:
    """What the prediction of a step missed; None without compiled times."""
    sentences = (miss_sentence(miss) for miss in verified.misses if miss.phase is phase)
    return next(map(sentence, sentences), None)


def _slices(slices: SliceSearch) -> PageTable:
    """The slices that were tried."""
    unit = "chips" if slices.prices is None else "price an hour"
    meets = (text_column("meets the objective"),) if slices.has_limits else ()
    prices = () if slices.prices is None else (figure_column("price per million output tokens"),)
    view = ViewTable(
        title="Slices",
        columns=(
            text_column("slice"),
            figure_column(unit),
            *meets,
            text_column("best plan"),
            *(figure_column(name, Unit.SECONDS) for name in ("TTFT", "TPOT")),
            figure_column("request tokens/s per chip"),
            *prices,
        ),
        rows=tuple(_slice_row(slices, search) for search in slices.searches),
        notes=tuple(map("{}.".format, slice_notes(slices))),
    )
    best = ["best" if search is slices.best else "" for search in slices.searches]
    return page_table("slices", view, row_classes=best)


def _slice_row(slices: SliceSearch, search: PlanSearch) -> tuple[str | float | None, ...]:
    choice = search.winner or search.closest
    meets = ("no" if search.winner is None else "yes",) if slices.has_limits else ()
    figures = ("ttft_s", "tpot_s", "tokens_per_s_per_chip")
    return (
        slice_name(search.space.topology),
        slices.price(search),
        *meets,
        "does not fit" if choice is None else choice_name(choice),
        *(None if choice is None else getattr(choice, name) for name in figures),
        *(() if slices.prices is None else (slices.price_per_million(search),)),
    )


def _placements(search: PlanSearch) -> Iterator[FoldedBlocks]:
    """The placements of the winner on the torus, the shortest request first."""
    if search.placements is None:
        return
    in_order = search.placements.in_order
    view = ViewTable(
        title="Placements of the axes on the torus",
        columns=(
            text_column("dimension: axes, the fastest last"),
            *(figure_column(name, Unit.SECONDS) for name in ("TTFT", "TPOT", "request")),
            figure_column("over mesh order"),
        ),
        rows=tuple(
            (
                "device ids in mesh order" if one.placement is None else str(one.placement),
                *(one.ttft_s, one.tpot_s, one.e2e_s),
                one.e2e_s / in_order.e2e_s,
            )
            for one in (in_order, *search.placements.placed)
        ),
    )
    yield from fold("Placement on the torus", [page_table("placements", view)])


def _apart(search: PlanSearch) -> Iterator[FoldedBlocks]:
    """Prefill and decode on slices of their own, and the best without quantization."""
    named = [("own format", search.own_format), ("without quantization", search.unquantized)]
    if search.apart is not None:
        named += [("prefill apart", search.apart.prefill), ("decode apart", search.apart.decode)]
    pairs = tuple((name, _figures_text(choice)) for name, choice in named if choice is not None)
    if pairs:
        yield from fold(
            "Without quantization, and prefill and decode apart", [DescriptionList(pairs=pairs)]
        )


def _dropped(search: PlanSearch) -> PageTable:
    """What was counted, and what was left out at each step."""
    n_beyond = search.n_candidates - search.n_meeting
    rows = [
        ("plans counted", search.n_counted, "every size of every axis that fills the slice"),
        *(("plans refused", n, reason) for reason, n in search.n_refused.items()),
        ("combinations counted", search.n_combinations, "with batch, precision and chunk"),
        *((DROPPED, n, reason) for reason, n in search.n_pruned.items()),
        ("combinations predicted", search.n_candidates, "weights and cache fit"),
        (DROPPED, n_beyond, "beyond the limits of TTFT or TPOT"),
        (
            DROPPED,
            search.n_meeting - len(search.front),
            "another one is as good in TTFT, TPOT and request tokens/s per chip, or temporaries do not fit",
        ),
        ("Pareto front", len(search.front), "the table below"),
    ]
    view = ViewTable(
        title="What was searched, and what was dropped",
        columns=(text_column("what"), figure_column("number"), text_column("why")),
        rows=tuple(row for row in rows if row[1] or row[0] != DROPPED),
    )
    return page_table("dropped", view)


def _launch(choice: Choice, n_layers: int | None) -> Advices:
    return Advices(
        title="Launch flags",
        advices=tuple(
            Advice(
                change=launch.server,
                gain="",
                reason="; ".join(f"not expressed: {item}" for item in launch.not_expressed),
                command=short(launch.command, MAX_COMMAND),
            )
            for launch in launches_of(choice.experiment, n_layers)
        ),
    )
