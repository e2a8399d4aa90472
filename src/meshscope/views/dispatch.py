"""Expert dispatch: how tokens reach their experts, and how many bytes a device receives."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from meshscope.events.enums import Phase
from meshscope.spec.experiment_record import (
    CompilerDispatch,
    DispatchRecord,
    PhaseDispatch,
    ProgramDispatch,
)
from meshscope.views.model import CellValue, Unit, ViewTable, figure_column, text_column
from meshscope.views.tables import rich_table

LABELS = {
    "ragged": "ragged: as many rows as the router assigns",
    "capacity": "a fixed number of rows from each device to each device",
    "one_hot": "multiplied by a one-hot mask with a fixed number of slots per expert",
    "one_hot_pinned": "multiplied by a one-hot mask, with sharding annotations on both sides of the exchange",
    "gathered": "rows gathered by index and sorted by expert",
}
EXPERT_SLOTS = "a fixed number of rows from each device to each expert"


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
