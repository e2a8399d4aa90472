"""Plans under several loads as text and as JSON: the best plan by load, the knee, and what would settle ties."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshscope.reports.model import joined, wrapped
from meshscope.reports.tables import COLUMNS, MAX_LINES
from meshscope.serialize import to_plain
from meshscope.serving.loads import LoadPoint, LoadRow, LoadTable
from meshscope.serving.prices import price_per_hour
from meshscope.units import format_rate, format_seconds

MAX_ROWS = 9  # at most; the title, the head and the last lines are in the first block, too
LEAST_ROWS = 3  # the first, the knee and the last
EQUAL = "equal"
SIMULATED = "a simulated engine with predicted steps"


def load_lines(
    table: LoadTable,
    *,
    is_full: bool = False,
    prices: Mapping[str, float] | None = None,
    below: Sequence[str] = (),
) -> Iterator[str]:
    """The best plan by load, the knee, and the lines `below` it, of at most 12 lines.

    `is_full` shows every load, then the figures of every plan and the frontier, with dollars per million output tokens,
    and leaves out the lines below.
    """
    experiment = table.curves[0].placed.experiment
    server = "an ideal engine" if table.server is None else str(table.server)
    what = "best plan by load" if len(table.curves) > 1 else table.winner.plan
    title = [*wrapped(f"{experiment.model.name} on {experiment.topology.name}, {server}: {what}")]
    yield from (*title, _head(table))
    n_rows = max(LEAST_ROWS, min(MAX_ROWS, MAX_LINES - 3 - len(title) - len(below)))
    for row in table.rows if is_full else _shown(table, n_rows):
        ahead = ""  # `+31% dp=8,ep=8`, or `equal dp=8,ep=8`, with the next plan
        if row.ahead_frac is not None:
            ahead = f"{EQUAL if row.n_equal else f'{row.ahead_frac:+.0%}'} {row.ranked[1][0]}"
        yield _line(table, row.load, row.ranked[0][0], row.best, ahead)
    curve, knee = table.winner, table.winner.knee
    rate = format_rate(knee.figures.output_tokens_per_s)
    latency = format_seconds(knee.latency_s)
    text = f"knee: {curve.plan} at {knee.load:,.6g}, {rate} tokens/s, {latency} per request"
    with_turns = f"{text}; best: {joined(turns(table))}"  # as far as a line has room
    yield with_turns if turns(table) and len(with_turns) <= COLUMNS else text
    if not is_full:
        yield from below
        return
    for turn in turns(table):
        yield f"turn: {turn}"
    for curve in table.curves:
        yield from ("", _head(table))
        yield from (_line(table, one.load, curve.plan, one, "") for one in curve.points)
    yield ""
    yield from _frontier_lines(table, prices)
    yield ""
    for row in table.rows:
        if row.why is not None:
            yield from wrapped(f"{load_text(table, row.load)}, {row.ranked[0][0]}: {row.why}")
    for plan, reason in table.left_out.items():
        yield from wrapped(f"left out: '{plan}': {reason}")
    yield from wrapped(NOTE)


NOTE = (
    "tok/s: output tokens per second of the slice. ahead: of the next plan; equal: the intervals of their "
    "predicted steps overlap. knee: most throughput per latency. docs/serving.md has the errors."
)


def _frontier_lines(table: LoadTable, prices: Mapping[str, float] | None) -> Iterator[str]:
    placed = table.curves[0].placed
    hour = None if prices is None else price_per_hour(placed.experiment.topology, prices)
    yield "frontier: output tokens/s per user (1 / TPOT p50) and per chip"
    dollars = "" if hour is None else f"{'$/M output':>12}"
    yield f"{'user':>9}{'chip':>9}{dollars}  plan"
    for one in table.frontier():
        user, chip = one.tokens_per_s_per_user, one.tokens_per_s_per_chip
        cost = ""
        if hour is not None:
            cost = f"{1e6 * hour * placed.n_instances / (3600 * chip * placed.n_chips):>12,.3g}"
        rates = f"{format_rate(user):>9}{format_rate(chip):>9}"
        yield f"{rates}{cost}  {one.plan} at {load_text(table, one.load)}"


def _shown(table: LoadTable, n_rows: int) -> list[LoadRow]:
    """At most `n_rows` rows, evenly spread: the first, the last and the knee among them."""
    rows, last = table.rows, len(table.rows) - 1
    if last < n_rows:
        return list(rows)
    shown = [round(at * last / (n_rows - 1)) for at in range(n_rows)]
    knee = next(at for at, row in enumerate(rows) if row.load == table.winner.knee.load)
    if knee not in shown:
        shown[min(range(1, n_rows - 1), key=lambda at: abs(shown[at] - knee))] = knee
    return [rows[at] for at in shown]


def _head(table: LoadTable) -> str:
    load = "in flight" if table.is_closed else "req/s"
    goodput = f"{'goodput':>9}" if table.objective.has_limits else ""
    last = "  ahead of" if len(table.curves) > 1 else f"{'ITL p99':>9}"
    return f"{load:>9}  {'plan':<15}{'tok/s':>7}{'TTFT p50':>9}{'TPOT p50':>9}{goodput}{last}"


def _line(table: LoadTable, load: float, plan: str, point: LoadPoint, ahead: str) -> str:
    figures = point.figures
    times = [(figures.ttft, "p50_s"), (figures.tpot, "p50_s"), (figures.itl, "p99_s")]
    ttft, tpot, itl = (
        f"{'-' if one is None else format_seconds(getattr(one, name)):>9}" for one, name in times
    )
    goodput = f"{figures.goodput_frac:>9.0%}" if table.objective.has_limits else ""
    rate = format_rate(figures.output_tokens_per_s)
    last = f"  {ahead}" if len(table.curves) > 1 else itl
    return f"{load:>9,.6g}  {plan:<15}{rate:>7}{ttft}{tpot}{goodput}{last}".rstrip()


def load_text(table: LoadTable, load: float) -> str:
    """`4 in flight` or `4 requests/s`."""
    return f"{load:,.6g} {'in flight' if table.is_closed else 'requests/s'}"


def turns(table: LoadTable) -> list[str]:
    """`dp=8,ep=8 from 64`, for each load at which the best plan is another one."""
    return [
        f"{row.ranked[0][0]} from {row.load:,.6g}"
        for before, row in zip(table.rows, table.rows[1:], strict=False)
        if row.ranked[0][0] != before.ranked[0][0]
    ]


def measurement_lines(table: LoadTable) -> Iterator[str]:
    """The cheapest benchmarks that would settle which plan is better where two are equal."""
    measurements = table.measurements()
    if not measurements:
        yield "next measurement: none, no two plans are equal within their intervals"
    for one in measurements:
        plans = joined([f"'{plan}'" for plan in one.plans])
        load = load_text(table, one.load)
        yield from wrapped(
            f"next measurement: benchmark {plans} at {load}, {one.n_requests:,} requests each: "
            f"{one.chip_s / 60:,.3g} chip minutes"
        )


def load_document(table: LoadTable) -> dict[str, Any]:
    """The table as one JSON document: the best plan by load, then all figures of each plan."""
    curve = table.winner
    return {
        "server": None if table.server is None else str(table.server),
        "load": "in_flight" if table.is_closed else "requests_per_s",
        "knee": {"plan": curve.plan, **to_plain(curve.knee)},
        "rows": [
            {
                "load": row.load,
                "plan": row.ranked[0][0],
                "ahead_frac": row.ahead_frac,
                "equal": [plan for plan, _ in row.ranked[1 : 1 + row.n_equal]],
                "why": row.why,
                **to_plain(row.best.figures),
            }
            for row in table.rows
        ],
        "plans": [{"plan": one.plan, "points": to_plain(one.points)} for one in table.curves],
        "left_out": dict(table.left_out),
        "frontier": to_plain(table.frontier()),
        "next_measurements": to_plain(table.measurements()),
    }
