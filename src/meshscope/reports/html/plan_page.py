"""The page of a search: the text of the command, with charts of the front and of the runner-up, and tables."""

from collections.abc import Iterator, Mapping, Sequence

from meshscope.reports import plan as texts
from meshscope.reports.answer import Fit
from meshscope.reports.charts.cost import front_chart, loads_chart, time_breakdown
from meshscope.reports.html import blocks
from meshscope.reports.html.page import blocks_html
from meshscope.reports.html.run import sentence
from meshscope.reports.html.sections import waterfall_blocks
from meshscope.reports.loads import load_lines, measurement_lines
from meshscope.reports.model import short, table_of
from meshscope.reports.slices import slice_lines
from meshscope.serving.grid import TOO_LARGE
from meshscope.serving.loads import LoadTable
from meshscope.serving.search import Choice, PlanSearch
from meshscope.serving.slices import SliceSearch, slice_name
from meshscope.units import format_dtype


def plan_html(search: PlanSearch, slices: SliceSearch | None = None) -> str:
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
    return blocks_html(headline, plan_blocks(search, slices), lead=lead)


def plan_blocks(search: PlanSearch, slices: SliceSearch | None = None) -> Iterator[blocks.Block]:
    """The answer, its charts, and the tables of choices."""
    facts = list(texts.answer_facts(search))
    if search.winner is None:
        said = (f"{label}: {text}" if label else text for label, text in facts)
        yield from (blocks.paragraph(sentence(text), "banner bad") for text in said)
    else:
        yield from blocks.descriptions((label, short(text)) for label, text in facts)
    near = () if search.closest is None else (search.closest, *search.fastest)
    shown = search.front or near
    others = tuple(choice for choice in search.best if choice not in search.front)
    if shown:
        yield front_chart(search, shown, others)
    won_by = search.won_by
    if won_by is not None and len(won_by.times) > 1 and search.winner is not None:
        plans = (search.winner.experiment.plan, won_by.runner_up.experiment.plan)
        sides = [{time.phase: time_breakdown(time) for time in times} for times in won_by.times]
        yield from waterfall_blocks(
            list(zip(map(str, plans), sides, strict=True)),
            n_decode_steps=search.space.workload.n_decode_steps,
            table_id="against",
        )
    if slices is not None:
        yield blocks.lines(slice_lines(slices))
    facts = [(label, short(text)) for label, text in texts.other_facts(search)]
    yield from blocks.fold("Other formats", blocks.descriptions(facts))
    if shown:
        yield _choices("front", "Pareto front" if search.front else "Closest", shown)
    if others:
        of_others = _choices("plans", "Best choice of other plans", others)
        yield from blocks.fold("The best choice of other plans", [of_others])
    notes = (*map(sentence, texts.count_texts(search)), *texts.search_notes(search))
    yield from blocks.fold("What was searched, and assumed", map(blocks.paragraph, notes))


def loads_html(table: LoadTable, prices: Mapping[str, float] | None = None) -> str:
    """The page of plans under several loads: the plot of throughput against latency, and the text of the command."""
    experiment = table.curves[0].placed.experiment
    headline = f"{table.winner.plan} serves {experiment.model.name} best on {experiment.topology.name} at most loads"
    said = [*load_lines(table, is_full=True, prices=prices), *measurement_lines(table)]
    return blocks_html(headline, [loads_chart(table), blocks.lines(said)])


def _choices(id_: str, title: str, choices: Sequence[Choice]) -> blocks.Block:
    columns = {
        "plan": lambda c: str(c.experiment.plan),
        "batch#": lambda c: c.experiment.workload.batch,
        "weights": lambda c: format_dtype(c.experiment.workload.weight_dtype),
        "cache": lambda c: format_dtype(c.experiment.workload.cache_dtype),
        "chunk#": lambda c: c.experiment.workload.prefill_chunk,
        "TTFT_s": "ttft_s",
        "TPOT_s": "tpot_s",
        "request_s": "e2e_s",
        "request tokens/s per chip#": "tokens_per_s_per_chip",
        "memory of a device_gib": lambda c: Fit(memory=c.memory).known_bytes,
        "fits": lambda c: c.memory.fit.value,
    }
    view = table_of(choices, columns, title=title)
    return blocks.page_table(id_, view, row_classes=["best"] if id_ == "front" else [])
