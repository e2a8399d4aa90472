"""Totals and memory of a run as tables, and how tokens reach their experts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.totals import Total, Unattributed, request_totals, step_totals
from meshscope.events.enums import Phase, Source
from meshscope.plans.experiment_record import (
    CompilerDispatch,
    DispatchRecord,
    PhaseDispatch,
    ProgramDispatch,
)
from meshscope.plans.memory import Memory
from meshscope.reports.model import (
    CellValue,
    Figure,
    Unit,
    ViewTable,
    figure_column,
    text_column,
    view_columns,
)
from meshscope.reports.plain import short
from meshscope.reports.tables import rich_table
from meshscope.reports.words import counted, phase_label
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes, format_gib

_ZERO = (0, 0, 0)
_MEMORY_FIELDS = {
    "weights": "weights_bytes",
    "KV cache": "kv_cache_bytes",
    "arguments": "argument_bytes",
    "outputs": "output_bytes",
    "temporaries": "temp_bytes",
}
LEAST_PADDING_BYTES = 2**30 // 200  # shows in hundredths of a GiB
LABELS = {
    "ragged": "ragged: as many rows as the router assigns",
    "capacity": "a fixed number of rows from each device to each device",
    "one_hot": "multiplied by a one-hot mask with a fixed number of slots per expert",
    "one_hot_pinned": "multiplied by a one-hot mask, with sharding annotations on both sides of the exchange",
    "gathered": "rows gathered by index and sorted by expert",
}
EXPERT_SLOTS = "a fixed number of rows from each device to each expert"


def totals_table(run: RunRecord) -> ViewTable:
    """Counts and bytes of one device, per step of each phase and per request."""
    figures = (
        f"{figure}\nper {span}{unit}"
        for span in ("step", "request")
        for figure, unit in (("count", ""), ("payload", "_bytes"), ("wire", "_bytes"))
    )
    return ViewTable(
        title="Totals of one device",
        columns=view_columns(("phase", "source"), figures),
        rows=tuple(_total_rows(run)),
    )


def _total_rows(run: RunRecord) -> Iterator[tuple[CellValue, ...]]:
    totals = {
        source: (step_totals(rows), request_totals(rows))
        for source in run.sources
        for rows in [run.rows_of(source)]
    }
    for phase in dict.fromkeys((*run.manifest.phases, *(row.phase for row in run.rows))):
        for source, by_span in totals.items():
            cells = [cell for by_phase in by_span for cell in _total_cells(by_phase, phase)]
            yield (phase_label(phase), source.value, *cells)


def _total_cells(
    totals: Mapping[Phase | None, Total], phase: Phase | None
) -> tuple[CellValue, ...]:
    total = totals.get(phase)
    if total is None:
        return _ZERO
    unsized = f"{total.count:,} (+{total.n_unsized} of unknown size)"
    count = unsized if total.n_unsized else total.count
    return count, total.payload_bytes, float(total.wire_bytes)


def memory_table(memory: Mapping[Source, Memory]) -> ViewTable:
    """The memory of one device by source, and its HBM capacity."""
    estimates = list(memory.values())
    fields = {
        label: name
        for label, name in _MEMORY_FIELDS.items()
        if name == "temp_bytes" or any(getattr(m, name) is not None for m in estimates)
    }
    return ViewTable(
        title="memory of one device",
        columns=(
            text_column(""),
            *(figure_column(source.value, Unit.MEMORY_BYTES) for source in memory),
        ),
        rows=(
            *((k, *(gib_cell(getattr(m, name)) for m in estimates)) for k, name in fields.items()),
            *_padding(estimates),
            ("total", *(_total_memory(m) for m in estimates)),
            *_total_range(estimates),
            ("HBM", *(gib_cell(m.hbm_bytes) for m in estimates)),
            ("fits", *(m.fit.label for m in estimates)),
        ),
    )


def _padding(estimates: Sequence[Memory]) -> Iterator[tuple[CellValue, ...]]:
    """What the total has beside the rows above, if it shows; a compiled total has its outputs in it."""
    others = [dict(memory_segments(memory)).get("other", 0.0) for memory in estimates]
    if max(others, default=0.0) >= LEAST_PADDING_BYTES:
        yield ("padding, other", *(gib_cell(round(other)) for other in others))


def memory_segments(memory: Memory) -> list[tuple[str, float]]:
    """The known parts of a device's memory in bytes; `other` is the rest of the total."""
    known = {label: getattr(memory, name) or 0 for label, name in _MEMORY_FIELDS.items()}
    other = max(0, (memory.total_bytes or 0) - sum(known.values()))
    return [(name, n) for name, n in (*known.items(), ("other", other)) if n]


def gib_cell(n_bytes: int | None) -> Figure:
    """Bytes of memory, in GiB; null is unknown."""
    return Figure(value=n_bytes, unit=Unit.MEMORY_BYTES)


def _total_memory(memory: Memory) -> CellValue:
    if memory.total_bytes is not None:
        return gib_cell(memory.total_bytes)
    return f"at least {format_gib(memory.known_bytes)}"


def _total_range(estimates: Iterable[Memory]) -> Iterator[tuple[CellValue, ...]]:
    """The interval of the total of the sources that estimate it, if there are any."""
    bounds = [(m.total_low_bytes, m.total_high_bytes) for m in estimates]
    if any(low is not None for low, _ in bounds):
        ranges = (
            None
            if low is None
            else Figure(value=low, unit=Unit.MEMORY_BYTES, low=low, high=high).range_text
            for low, high in bounds
        )
        yield ("  range", *ranges)


def fits_cell(fits: bool | None) -> CellValue:  # noqa: FBT001  three values
    """`yes`, `NO`, or unknown."""
    if fits is None:
        return Figure(value=None, unit=Unit.TEXT)
    return "yes" if fits else "NO"


def unattributed_lines(lost: Unattributed) -> list[Text]:
    """How many collectives could not be attributed, and why."""
    if not lost.count:
        return [Text("unattributed: none")]
    count = counted(lost.count, "collective")
    head = f"unattributed: {count}, {format_bytes(lost.payload_bytes)} payload"
    return [Text(head, style="bold red"), *map(Text, _reasons(lost.reasons))]


def _reasons(reasons: Iterable[tuple[str, int]]) -> list[str]:
    return [f"  {count:,} x {short(reason)}" for reason, count in reasons]


def dispatch_lines(dispatch: DispatchRecord) -> Iterator[RenderableType]:
    """The exchange of one layer: rows, buffers, dropped tokens and received bytes.

    The collectives of the tables above assume balanced routing.
    """
    if isinstance(dispatch, CompilerDispatch):
        yield Text(f"experts: {LABELS[dispatch.form]}; the compiler chooses the collectives")
        return
    if not dispatch.by_phase:
        return
    first = next(iter(dispatch.by_phase.values()))
    form = LABELS.get(first.form, first.form) if first.n_expert_slots is None else EXPERT_SLOTS
    yield Text(f"experts on {'+'.join(first.axes)} ({first.n_ranks} devices), {form}")
    yield rich_table(dispatch_view(dispatch))


def dispatch_view(dispatch: ProgramDispatch) -> ViewTable:
    """One row for each phase."""
    counts = ("rows\nfrom a device", "buffer\nrows", "dropped,\nworst case")
    received = (
        "received,\nbalanced",
        f"received,\nskew {dispatch.routing_skew:g}",
        "received,\nworst case",
    )
    return ViewTable(
        columns=(
            text_column("dispatch\nper layer"),
            *map(figure_column, counts),
            *(figure_column(label, Unit.BYTES) for label in received),
        ),
        rows=tuple(_row(phase, facts) for phase, facts in dispatch.by_phase.items()),
    )


def _row(phase: Phase, facts: PhaseDispatch) -> tuple[CellValue, ...]:
    counts = (facts.n_rows, facts.n_buffer_rows, facts.n_worst_dropped_rows)
    received = facts.received_bytes
    return (phase.value, *counts, received.balanced, received.skewed, received.worst)
