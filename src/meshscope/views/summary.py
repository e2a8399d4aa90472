"""Totals and memory of a run as tables."""

from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from meshscope.analysis.totals import Total, request_totals, step_totals
from meshscope.analysis.unattributed import Unattributed
from meshscope.events.enums import Phase, Source
from meshscope.spec.plan.memory import Memory
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes, format_gib
from meshscope.views.plain import short
from meshscope.views.tables import new_table
from meshscope.views.words import count_words, phase_words

FIGURES = ("count", "payload", "wire")


def totals_table(run: RunRecord) -> Table:
    """What one device sends and meets, in one step of each phase and in the whole request."""
    names = [f"{figure}\na {span}" for span in ("step", "request") for figure in FIGURES]
    table = new_table("phase", "source", *names, n_words=2)
    by_source = {source: run.rows_of(source) for source in run.sources}
    step = {source: step_totals(rows) for source, rows in by_source.items()}
    request = {source: request_totals(rows) for source, rows in by_source.items()}
    found = dict.fromkeys(row.phase for row in run.rows)
    for phase in [*run.manifest.phases, *(p for p in found if p not in run.manifest.phases)]:
        for source in run.sources:
            table.add_row(
                phase_words(phase),
                source.value,
                *_total_cells(step[source], phase),
                *_total_cells(request[source], phase),
            )
    return table


def _total_cells(totals: Mapping[Phase | None, Total], phase: Phase | None) -> list[str]:
    total = totals.get(phase)
    if total is None:
        return ["0", "0 B", "0 B"]
    mark = f" (+{total.n_unsized} of unknown size)" if total.n_unsized else ""
    payload, wire = format_bytes(total.payload_bytes), format_bytes(total.wire_bytes)
    return [f"{total.count:,}{mark}", payload, wire]


def memory_table(memory: Mapping[Source, Memory]) -> Table:
    """Memory of one device by source, against its HBM."""
    table = new_table("memory of one device", *(source.value for source in memory))
    figures = list(memory.values())
    for name, field in (
        ("weights", "weights_bytes"),
        ("KV cache", "kv_cache_bytes"),
        ("temporary", "temp_bytes"),
    ):
        table.add_row(name, *(_gib(getattr(figure, field)) for figure in figures))
    table.add_row("total", *(_total_gib(figure) for figure in figures))
    table.add_row("HBM", *(_gib(figure.hbm_bytes) for figure in figures))
    table.add_row("fits", *(_fits(figure) for figure in figures))
    return table


def _gib(n_bytes: int | None) -> str:
    return "not known" if n_bytes is None else format_gib(n_bytes)


def _total_gib(memory: Memory) -> str:
    if memory.total_bytes is not None:
        return format_gib(memory.total_bytes)
    return f"at least {format_gib(memory.weights_bytes + memory.kv_cache_bytes)}"


def _fits(memory: Memory) -> Text:
    if memory.fits is None:
        return Text("not known")
    if memory.fits:
        return Text("yes", style="green")
    return Text("NO", style="bold red")


def unattributed_lines(found: Unattributed) -> list[Text]:
    """How much could not be attributed, and why."""
    if not found.count:
        return [Text("unattributed: none")]
    head = f"unattributed: {count_words(found.count)}, {format_bytes(found.payload_bytes)} payload"
    return [Text(head, style="bold red"), *map(Text, _reasons(found.reasons))]


def _reasons(reasons: Iterable[tuple[str, int]]) -> list[str]:
    return [f"  {count:,} x {short(reason)}" for reason, count in reasons]
