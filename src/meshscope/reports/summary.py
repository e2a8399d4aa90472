"""Totals and memory of a run as tables, and how tokens reach their experts."""

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.totals import Unattributed, request_totals, step_totals
from meshscope.events.enums import Source
from meshscope.plans.experiment_record import DispatchRecord
from meshscope.plans.memory import Memory
from meshscope.reports.model import CellValue, Figure, Unit, ViewTable, known, short, table
from meshscope.reports.tables import rich_table
from meshscope.reports.words import phase_label
from meshscope.store.run import RunRecord
from meshscope.units import counted, format_bytes, format_gib

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
}
EXPERT_SLOTS = "a fixed number of rows from each device to each expert"


def totals_table(run: RunRecord) -> ViewTable:
    """Counts and bytes of one device, per step of each phase and per request."""
    figures = (
        f"{figure}\nper {span}{unit}"
        for span in ("step", "request")
        for figure, unit in (("count", "#"), ("payload", "_bytes"), ("wire", "_bytes"))
    )
    totals = {s: (step_totals(run.rows_of(s)), request_totals(run.rows_of(s))) for s in run.sources}
    phases = dict.fromkeys((*run.manifest.phases, *(row.phase for row in run.rows)))
    rows: list[list[CellValue]] = []
    for phase in phases:
        for source, by_span in totals.items():
            rows.append([phase_label(phase), source.value])
            for total in (of_span.get(phase) for of_span in by_span):
                if total is None:
                    rows[-1] += [0, 0, 0]
                    continue
                count: CellValue = total.count
                if total.n_unsized:
                    count = f"{count:,} ({total.n_unsized:,} of unknown size)"
                sizes = (total.payload_bytes, float(total.wire_bytes))
                rows[-1] += [count, *(sizes if total.is_sized else (None, None))]
    return table(("phase", "source", *figures), rows, title="Totals of one device")


def memory_table(memory: Mapping[Source, Memory]) -> ViewTable:
    """The memory of one device by source, and its HBM capacity."""
    estimates = list(memory.values())
    parts = {label: [getattr(m, name) for m in estimates] for label, name in _MEMORY_FIELDS.items()}
    rows: list[tuple[CellValue, ...]] = [
        (label, *map(known, sizes))
        for label, sizes in parts.items()
        if label == "temporaries" or any(size is not None for size in sizes)
    ]
    # The rest of the total, if it shows; a compiled total includes its outputs.
    others = [dict(memory_segments(m)).get("other", 0.0) for m in estimates]
    if max(others, default=0.0) >= LEAST_PADDING_BYTES:
        rows.append(("padding, other", *map(round, others)))
    at_least = (f"at least {format_gib(m.known_bytes)}" for m in estimates)
    sums = zip(at_least, (m.total_bytes for m in estimates), strict=True)
    rows.append(("total", *(least if total is None else total for least, total in sums)))
    bounds = [(m.total_low_bytes, m.total_high_bytes) for m in estimates]
    if any(low is not None for low, _ in bounds):
        gib = Unit.MEMORY_BYTES
        ranges = (
            None if low is None else Figure(value=low, unit=gib, low=low, high=high).range_text
            for low, high in bounds
        )
        rows.append(("  range", *ranges))
    rows.append(("HBM", *(known(m.hbm_bytes) for m in estimates)))
    rows.append(("fits", *(m.fit.label for m in estimates)))
    return table(("", *(f"{source}_gib" for source in memory)), rows, title="memory of one device")


def memory_segments(memory: Memory) -> list[tuple[str, float]]:
    """The known parts of a device's memory in bytes; `other` is the rest of the total."""
    known = {label: getattr(memory, name) or 0 for label, name in _MEMORY_FIELDS.items()}
    other = max(0, (memory.total_bytes or 0) - sum(known.values()))
    return [(name, n) for name, n in (*known.items(), ("other", other)) if n]


def unattributed_lines(lost: Unattributed) -> list[Text]:
    """How many collectives could not be attributed, and why."""
    if not lost.count:
        return [Text("unattributed: none")]
    count = counted(lost.count, "collective")
    known = "unknown" if lost.payload_bytes is None else format_bytes(lost.payload_bytes)
    head = f"unattributed: {count}, {known} payload"
    reasons = (Text(f"  {n:,} x {short(reason)}") for reason, n in lost.reasons)
    return [Text(head, style="bold red"), *reasons]


def dispatch_lines(dispatch: DispatchRecord) -> Iterator[RenderableType]:
    """The exchange of one layer: rows, buffers, dropped tokens and received bytes.

    The collectives of the tables above assume balanced routing.
    """
    if dispatch.form is not None:
        yield Text(f"experts: {LABELS[dispatch.form]}; the compiler chooses the collectives")
        return
    if not dispatch.by_phase:
        return
    first = next(iter(dispatch.by_phase.values()))
    form = LABELS.get(first.form, first.form) if first.n_expert_slots is None else EXPERT_SLOTS
    yield Text(f"experts on {'+'.join(first.axes)} ({first.n_ranks} devices), {form}")
    counts = ("rows\nfrom a device#", "buffer\nrows#", "dropped,\nworst case#")
    skew = f"skew {dispatch.routing_skew:g}"
    received = (f"received,\n{how}_bytes" for how in ("balanced", skew, "worst case"))
    rows = (
        (
            *(phase.value, facts.n_rows, facts.n_buffer_rows, facts.n_worst_dropped_rows),
            *(sent.balanced, sent.skewed, sent.worst),
        )
        for phase, facts in dispatch.by_phase.items()
        for sent in [facts.received_bytes]
    )
    yield rich_table(table(("dispatch\nper layer", *counts, *received), rows))
