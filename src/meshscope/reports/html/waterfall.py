"""Where the time of a step goes differently: a waterfall by part and axis, and the same as a table."""

from collections.abc import Iterator, Mapping, Sequence

from meshscope.events.enums import Phase
from meshscope.reports.charts.cost import Breakdown, request_breakdown, waterfall_chart
from meshscope.reports.html.blocks import Block, PageTable, fold, page_table
from meshscope.reports.model import Unit, ViewTable, figure_column, text_column
from meshscope.units import NANOSECOND_S

SMALL_FRAC = 0.001  # of the whole; smaller differences have no row

Steps = Mapping[Phase, Breakdown]


def waterfall_blocks(
    named: Sequence[tuple[str, Steps]], *, n_decode_steps: int | None, table_id: str
) -> Iterator[Block]:
    """The steps of the first name against those of the others; nothing without a phase that all have."""
    names = [name for name, _ in named]
    spans = _spans([steps for _, steps in named], n_decode_steps)
    if len(named) < 2 or not spans:
        return
    yield waterfall_chart(names, spans)
    span, breakdowns = next(iter(spans.items()))
    yield from fold("Differences as a table", [_differences(names, span, breakdowns, table_id)])


def _spans(steps: Sequence[Steps], n_decode_steps: int | None) -> dict[str, list[Breakdown]]:
    """The breakdowns of the request, and of each phase that all sides have."""
    shared = [phase for phase in Phase if all(phase in of_side for of_side in steps)]
    spans = {f"{phase} step": [of_side[phase] for of_side in steps] for phase in shared}
    if n_decode_steps is None or any(len(of_side) > len(shared) for of_side in steps):
        return spans
    requests = [request_breakdown(of_side, n_decode_steps) for of_side in steps]
    return {"request": requests, **spans} if len(shared) > 1 else spans


def _differences(
    names: Sequence[str], span: str, breakdowns: Sequence[Breakdown], id_: str
) -> PageTable:
    """Seconds of the first side, and what the others take beyond it, by part and axis."""
    first, *others = ({**breakdown, "total": sum(breakdown.values())} for breakdown in breakdowns)
    parts = list(dict.fromkeys(part for breakdown in breakdowns for part in breakdown))
    rows = [
        (part, first.get(part, 0.0), *(_change_s(first, other, part) for other in others))
        for part in (*parts, "total")
    ]
    least_s = SMALL_FRAC * first["total"]
    view = ViewTable(
        title=f"Time of one {span} and its differences",
        columns=(
            text_column("part or axis"),
            figure_column(names[0], Unit.SECONDS),
            *(figure_column(f"{name} minus {names[0]}", Unit.SECONDS) for name in names[1:]),
        ),
        rows=tuple(row for row in rows if row[0] == "total" or max(map(abs, row[1:])) >= least_s),
    )
    return page_table(id_, view)


def _change_s(before: Breakdown, after: Breakdown, part: str) -> float:
    """The change of a part; 0 within the rounding error of the sums, a nanosecond."""
    change_s = after.get(part, 0.0) - before.get(part, 0.0)
    return change_s if abs(change_s) >= NANOSECOND_S else 0.0
