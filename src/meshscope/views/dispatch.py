"""How tokens reach their experts, and what that brings to one device, as lines and a table."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from meshscope.spec.experiment_record import CompilerDispatch, DispatchRecord
from meshscope.units import format_bytes
from meshscope.views.tables import new_table

WORDS = {
    "ragged": "ragged: as many rows as the routing says",
    "capacity": "a fixed number of rows from each device to each",
    "one_hot": "products with a one-hot mask of a fixed number of slots an expert",
    "one_hot_pinned": "products with a one-hot mask, rows annotated on both sides of the exchange",
    "gathered": "rows gathered by index and sorted by expert",
}
EXPERT_SLOTS = "a fixed number of rows from each device to each expert"


def dispatch_lines(dispatch: DispatchRecord) -> Iterator[RenderableType]:
    """The exchange of one layer: rows, room, loss, and the bytes that come to a device.

    The row's payload and wire bytes in the tables above are those of balanced routing.
    """
    if isinstance(dispatch, CompilerDispatch):
        yield Text(f"experts: {WORDS[dispatch.form]}; the compiler decides what travels")
        return
    skew, facts = dispatch.routing_skew, list(dispatch.by_phase.items())
    if not facts:
        return
    first = facts[0][1]
    words = WORDS.get(first.form, first.form) if first.n_expert_slots is None else EXPERT_SLOTS
    yield Text(f"experts on {'+'.join(first.axes)} ({first.n_ranks} devices), {words}")
    table = new_table(
        "dispatch\na layer",
        "rows\nfrom a device",
        "room for",
        "dropped\nat worst",
        "received,\nbalanced",
        f"received,\nskew {skew:g}",
        "received\nat worst",
    )
    for phase, fact in facts:
        received = fact.received_bytes
        counts = (fact.n_rows, fact.n_buffer_rows, fact.n_worst_dropped_rows)
        sizes = (received.balanced, received.skewed, received.worst)
        table.add_row(phase, *(f"{count:,}" for count in counts), *map(format_bytes, sizes))
    yield table
