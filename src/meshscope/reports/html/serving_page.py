"""The page of a simulated server: its answer, the engines over time, and the conditions."""

from collections.abc import Iterator

from meshscope.reports.charts.serving import series_chart, serving_charts
from meshscope.reports.html.blocks import (
    Block,
    DescriptionList,
    Paragraph,
    Tile,
    Tiles,
    fold,
    page_table,
)
from meshscope.reports.html.page import blocks_html
from meshscope.reports.model import ViewTable, view_columns
from meshscope.reports.serving import (
    RATE,
    TIME_COLUMNS,
    Fact,
    condition_facts,
    engine_facts,
    rate_facts,
    rate_verdict,
    serving_title,
    time_rows,
)
from meshscope.serving.simulation import ServingOutcome
from meshscope.units import format_seconds

ABOUT = (
    "One engine of each kind. Long simulations show means over 300 equal stretches of time. Dots mark the "
    "highest value of a line and its last change."
)


def serving_html(outcome: ServingOutcome) -> str:
    """The page as one HTML file."""
    return blocks_html(serving_title(outcome), tuple(_blocks(outcome)))


def _blocks(outcome: ServingOutcome) -> Iterator[Block]:
    result = outcome.result
    style = "note bad" if result.is_stable is False else "lead"
    yield Paragraph(text=f"{rate_verdict(result)}.", class_name=style)
    yield Tiles(tiles=tuple(_tiles(outcome)))
    yield _facts(*(fact for fact in rate_facts(outcome) if fact[0] != RATE), *engine_facts(outcome))
    view = ViewTable(
        title="Times of requests",
        columns=view_columns(("time",), [f"{name}_s" for name in TIME_COLUMNS]),
        rows=tuple((label, *cells) for label, cells in time_rows(result)),
    )
    yield page_table("times", view)
    yield Paragraph(text=ABOUT)
    yield from map(series_chart, serving_charts(outcome))
    yield from fold("Conditions", [_facts(*condition_facts(outcome))])


def _facts(*facts: Fact) -> DescriptionList:
    return DescriptionList(pairs=tuple((label, text) for label, text in facts if text))


def _tiles(outcome: ServingOutcome) -> Iterator[Tile]:
    figures = outcome.result.figures
    for name, values in (("TTFT", figures.ttft), ("TPOT", figures.tpot), ("ITL", figures.itl)):
        if values is not None:
            note = f"p99 {format_seconds(values.p99_s)}"
            yield Tile(name=f"{name}, median", value=format_seconds(values.p50_s), note=note)
    per_chip = figures.output_tokens_per_s / outcome.n_chips
    yield Tile(
        name="request tokens/s",
        value=f"{figures.output_tokens_per_s:,.0f}",
        note=f"{per_chip:,.0f} per chip",
    )
