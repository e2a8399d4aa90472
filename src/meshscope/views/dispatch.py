"""How tokens reach their experts, and what that brings to one device, as lines and a table."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.events.enums import Phase
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


def dispatch_lines(dispatch: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The exchange of one layer: rows, room, loss, and the bytes that come to a device.

    The row's payload and wire bytes in the tables above are those of balanced routing.
    """
    if "by" in dispatch:
        yield Text(f"experts: {WORDS[dispatch['form']]}; the compiler decides what travels")
        return
    skew = dispatch["routing_skew"]
    facts = [(phase.value, dispatch[phase.value]) for phase in Phase if phase.value in dispatch]
    form, axes = facts[0][1]["form"], "+".join(facts[0][1]["axes"])
    has_expert_slots = facts[0][1].get("n_expert_slots") is not None
    words = EXPERT_SLOTS if has_expert_slots else WORDS.get(form, form)
    yield Text(f"experts on {axes} ({facts[0][1]['n_ranks']} devices), {words}")
    table = new_table(
        "dispatch\na layer",
        "rows\nfrom a device",
        "room for",
        "dropped\nat worst",
        "received,\nbalanced",
        f"received,\nskew {skew:g}",
        "received\nat worst",
    )
    for phase, found in facts:
        received = found["received_bytes"]
        counts = (found[name] for name in ("n_rows", "n_buffer_rows", "n_worst_dropped_rows"))
        sizes = (received[name] for name in ("balanced", "skewed", "worst"))
        table.add_row(phase, *(f"{count:,}" for count in counts), *map(format_bytes, sizes))
    yield table
