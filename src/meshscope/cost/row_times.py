"""Times of collective rows from a simulated schedule."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshscope.cost.machine import LINK_LANE, Span
from meshscope.cost.simulator import SimulatedStep
from meshscope.events.collective import Collective
from meshscope.events.step_time import TimeBasis
from meshscope.events.timeline import repetition_starts
from meshscope.readers.hlo.collectives import ModuleCollectives
from meshscope.readers.hlo.operations import Operation, source_ops_of

MAX_STARTS = 20_000  # start times kept per instruction


def timed_rows(
    rows: Sequence[Collective], module_collectives: ModuleCollectives, simulated: SimulatedStep
) -> list[Collective]:
    """The rows with start, duration and exposed time of their scheduled instructions."""
    by_name: dict[str, list[Operation]] = defaultdict(list)
    for operation in module_collectives.merged:
        by_name[operation.scheduled_op.instruction.name].append(operation)
    n_before: Counter[tuple[str, int | None]] = Counter()  # executions in earlier layers
    timed: list[Collective] = []
    starts: dict[tuple[str, int | None], list[float]] = {}
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for span in simulated.spans:
        spans[span.task.name].append(span)
    for row in rows:
        name = row.hlo_name or ""
        operations = by_name.get(name)
        if not operations:
            timed.append(row)
            continue
        key = name, row.stage
        if key not in starts:
            of_name = spans[source_ops_of(operations)[0]]
            starts[key] = _starts(s for s in of_name if not s.stages or row.stage in s.stages)
        at = n_before[key] // len(operations)
        start_s = starts[key][at] if at < len(starts[key]) else None
        timed.append(_timed_row(row, operations, simulated, start_s))
        # A stage runs all of its layers before the next micro-batch.
        n_before[key] += row.count // operations[0].scope.n_microbatches
    return timed


def _timed_row(
    row: Collective,
    operations: Sequence[Operation],
    simulated: SimulatedStep,
    start_s: float | None,
) -> Collective:
    """The row with its mean time over all executions; arrays that travel together share it by payload."""
    times = _mean_times(operations, simulated)
    if times is None:
        return row
    dur_s, exposed_s = times
    sizes = [operation.payload_bytes for operation in operations]
    share = 1.0
    if len(operations) > 1 and row.payload_bytes is not None and None not in sizes:
        share = row.payload_bytes / max(1, sum(size or 0 for size in sizes))
    return replace(
        row,
        start_s=start_s,
        dur_s=dur_s * share,
        exposed_s=None if exposed_s is None else exposed_s * share,
        time_basis=TimeBasis.INTERCONNECT_MODEL.value,
    )


def _mean_times(
    operations: Sequence[Operation], simulated: SimulatedStep
) -> tuple[float, float | None] | None:
    """Duration and exposed seconds of one execution; None without an estimate."""
    names = [name for name in source_ops_of(operations) if name in simulated.collectives]
    estimates = [simulated.collectives[name].seconds for name in names]
    if not estimates or estimates[0] is None or None in estimates:
        return None
    tally = simulated.machine.tally
    dur_s, exposed_s = (
        sum(tally.get((quantity, (LINK_LANE, name)), 0.0) for name in names)
        for quantity in ("dur", "exposed")
    )
    n = operations[0].count if len(names) > 1 else tally.get(("n", (LINK_LANE, names[0])), 0.0)
    if dur_s and n:
        return dur_s / n, exposed_s / n
    if len(names) > 1:
        return None
    seconds = estimates[0].value_s  # in a branch that the simulation skipped
    return seconds, None if operations[0].is_async else seconds


def _starts(spans: Iterable[Span]) -> list[float]:
    starts: list[float] = []
    for span in spans:
        if len(starts) < MAX_STARTS:
            repetitions = repetition_starts(span.start_s, span.repeats)
            starts += repetitions[: MAX_STARTS - len(starts)].tolist()
    return sorted(starts)
