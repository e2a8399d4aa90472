"""The charts and the page of a simulated server: its answer, the engines over time, and the conditions."""

from collections.abc import Callable, Iterator

from meshscope.reports import serving as texts
from meshscope.reports.charts.spec import Chart, chart, color_by, columnar, name_of, number_text
from meshscope.reports.html.blocks import Block, descriptions, fold, page_table, paragraph, tiles
from meshscope.reports.html.page import blocks_html
from meshscope.reports.model import Unit, table
from meshscope.serving.simulation import EngineRole, ServingOutcome, TimelineSample
from meshscope.units import format_seconds

ABOUT = (
    "One engine of each kind. Long simulations show means over 300 equal stretches of time. A dot marks the "
    "highest value of a line."
)


Value = Callable[[TimelineSample], float]

# Title, unit, and the lines of an engine with their values.
_CHARTS: tuple[tuple[str, str, dict[str, Value]], ...] = (
    (
        "Sequences in an engine",
        "",
        {"in the engine": lambda s: s.n_running, "waiting": lambda s: s.n_waiting},
    ),
    ("Cache in use", "%", {"cache": lambda s: 100 * s.cache_frac}),
    (
        "Tokens of a step",
        "",
        {"prompt": lambda s: s.n_prompt_tokens, "decoded": lambda s: s.n_decode_tokens},
    ),
)


def serving_charts(outcome: ServingOutcome) -> Iterator[Chart]:
    """The charts of a simulated server over time, one engine of each role; a value holds until the next."""
    pools = outcome.result.pools
    end_s = max((pool.timeline[-1].time_s for pool in pools if pool.timeline), default=0.0)
    for title, unit, values in _CHARTS:
        lines = {
            name if pool.role is EngineRole.BOTH else f"{pool.role}: {name}": points
            for pool in pools
            for name, value in values.items()
            for points in [[(sample.time_s, value(sample)) for sample in pool.timeline]]
            if any(v for _, v in points)
        }
        highest = (f"{name} up to {max(v for _, v in of):,.4g}" for name, of in lines.items())
        yield chart(
            "series",
            "; ".join(highest) or "nothing",
            title=title,
            rows=[
                columnar("t v", [*points, (end_s, points[-1][1])], name=name_of(name))
                for name, points in lines.items()
            ],
            end=end_s or 1,
            unit=unit or None,
            suffix=unit,
            at=number_text("datum.t", Unit.SECONDS, digits=3),
            color=color_by("name", map(name_of, lines)),
        )


def serving_html(outcome: ServingOutcome) -> str:
    """The page as one HTML file."""
    return blocks_html(texts.serving_title(outcome), _blocks(outcome))


def _blocks(outcome: ServingOutcome) -> Iterator[Block]:
    result = outcome.result
    style = "note bad" if result.is_stable is False else "lead"
    yield paragraph(f"{texts.rate_verdict(result)}.", style)
    figures, shown = result.figures, list[tuple[str, str, str]]()
    for name, values in (("TTFT", figures.ttft), ("TPOT", figures.tpot), ("ITL", figures.itl)):
        if values is not None:
            median, p99 = format_seconds(values.p50_s), f"p99 {format_seconds(values.p99_s)}"
            shown.append((f"{name}, median", median, p99))
    rate, per_chip = figures.output_tokens_per_s, figures.output_tokens_per_s / outcome.n_chips
    yield tiles([*shown, ("request tokens/s", f"{rate:,.0f}", f"{per_chip:,.0f} per chip")])
    rates = (fact for fact in texts.rate_facts(outcome) if fact[0] != texts.RATE)
    yield from descriptions([*rates, *texts.engine_facts(outcome)])
    names = ("time", *(f"{name}_s" for name in texts.TIME_COLUMNS))
    rows = ((label, *cells) for label, cells in texts.time_rows(result))
    yield page_table("times", table(names, rows, title="Times of requests"))
    yield paragraph(ABOUT)
    yield from serving_charts(outcome)
    yield from fold("Conditions", descriptions(texts.condition_facts(outcome)))
