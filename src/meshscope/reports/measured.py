"""What was measured, as text: a live run's latency, setup and generated text; and an imported trace.

A trace has first the quality of the capture, then its steps, collectives and benchmarks.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.comparison import n_promoted_collectives, runs_on_cpu
from meshscope.analysis.request import Spread, request_latency, step_spreads
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase, Source
from meshscope.events.measured import Measured, StepLabel, TraceFacts, TransferTime
from meshscope.reports import model
from meshscope.reports.answer import SHARED_CORES, title_of
from meshscope.reports.collectives import UNITS, axis_text
from meshscope.reports.conditions import conditions
from meshscope.reports.model import (
    EMPTY_LABEL,
    UNKNOWN_LABEL,
    CellValue,
    ViewTable,
    joined,
    known,
    plain,
    table,
)
from meshscope.reports.tables import bullets, first_block, fits_first_block, rich_table
from meshscope.reports.words import group_text
from meshscope.store.run import RunRecord
from meshscope.units import counted, format_bytes, format_rate, format_seconds

MAX_FINDINGS = 8  # printed lines; the rest is counted

PROMOTED = (
    "XLA performs 16-bit collectives in float32 on CPU devices. The prediction is compared as float32, "
    "with twice the bytes. TPUs keep 16 bits; --dtype f32 avoids the promotion."
)


def live_lines(run: RunRecord) -> Iterator[RenderableType]:
    """Findings about the profile, the latency of the timed requests, and the generated text."""
    measured, latency, steps = run.measured, request_latency(run), step_spreads(run)
    if measured is None or (latency is None and not steps):
        return
    yield from _capture_notes(run, measured)
    yield Text("")
    title = "time of steps"
    spreads: dict[str, Spread | None] = {phase.value: spread for phase, spread in steps.items()}
    if latency is not None:
        title = "time of requests"
        spreads = {
            "TTFT, to the first token": latency.ttft,
            "TPOT, per later token of a request": latency.tpot,
            "ITL, from token to token": latency.itl,
            "end to end": latency.e2e,
        }
    known = ((name, one) for name, one in spreads.items() if one is not None)
    rows = ((name, s.mean_s, s.p50_s, s.p90_s, s.p99_s, s.n) for name, s in known)
    yield rich_table(table((title, "mean_s", "p50_s", "p90_s", "p99_s", "n#"), rows))
    if latency is not None:
        rates = {
            "request tokens/s": latency.output_tokens_per_s,
            "prompt tokens/s in prefill": latency.prefill_tokens_per_s,
            "decode tokens/s": latency.decode_tokens_per_s,
        }
        said = (f"{format_rate(rate)} {unit}" for unit, rate in rates.items() if rate is not None)
        yield Text(f"throughput: {', '.join(said)}")
    seconds = run.manifest.seconds
    setup = {f"{phase} compile": seconds.get(f"{phase}.compile") for phase in Phase}
    setup |= {name.replace("_", " "): seconds.get(name) for name in ("weights", "warm_up")}
    durations = [f"{name} {format_seconds(s)}" for name, s in setup.items() if s is not None]
    yield Text(f"setup, excluded above: {', '.join(durations)}")
    yield Text("")
    if measured.texts:
        yield Text("generated text", style="bold")
        yield from (Text(f"  {plain(text)}") for text in measured.texts)
        yield Text("")


def _capture_notes(run: RunRecord, measured: Measured) -> Iterator[Text]:
    counts = measured.n_profiled_steps.items()
    words = [counted(n, "step" if p is Phase.STEP else f"{p} step") for p, n in counts]
    steps, findings = joined(words), measured.findings
    if not findings:
        yield Text(f"profile: {steps}, complete: every collective of every device", style="green")
    else:
        head = f"profile: {steps}; {counted(len(findings), 'finding')} about its quality"
        yield Text(head, style="bold red")
        yield from (Text(f"  {plain(finding)}") for finding in findings[:MAX_FINDINGS])
        if len(findings) > MAX_FINDINGS:
            yield Text(f"  {len(findings) - MAX_FINDINGS} more in metrics.json")
    if n_promoted_collectives(run):
        yield Text(PROMOTED, style="yellow")
    if runs_on_cpu(run):
        yield Text(f"note: {SHARED_CORES}", style="yellow")


MAX_ROWS = 24  # printed collectives of a class of steps
FORMATS = {
    "kineto": "Kineto",
    "xplane": "XPlane",
    "chakra": "Chakra",
    "nsys sqlite": "SQLite of nsys",
    "chrome trace of the TPU profiler": "Chrome trace of the TPU profiler",
}
COUNTED = (
    "count: in one step on one device. time: mean, waiting included. exposed: not hidden by "
    "compute. busbw: wire bytes over the time of the rank that comes last if all ranks have a trace, "
    "else over the mean time. " + UNITS
)


def trace_text(run: RunRecord, *, is_full: bool) -> Iterator[RenderableType]:
    """The report of an imported trace for a terminal; a trace has no request to time."""
    measured, facts = _facts(run)
    title = Text(f"{model.short(title_of(run))} ({run.manifest.source})", style="bold")
    head = (title, Text(capture_sentence(facts), style="bold"))
    findings = list(_findings(run, is_full=is_full))
    steps = steps_view(measured, facts)
    means = list[Text]()
    if not fits_first_block((*head, *findings, "", steps.title, rich_table(steps)), is_last=False):
        of_steps = ((s, _share(measured, s.label, "exposed_s")) for s in facts.steps)
        words = [
            f"{step.label} {format_seconds(step.mean_s)}".removeprefix("step ")
            + ("" if exposed is None else f" ({exposed:.1%} exposed communication)")
            for step, exposed in of_steps
            if step.label is not StepLabel.OUTSIDE
        ]
        means = [Text(f"mean step: {', '.join(words)}")] if words else []
    shown, left = first_block((*head, *means), findings)
    yield from (*head, *shown, *means, *([Text("")] if left else []), *left)
    yield Text("")
    for view in trace_tables(run, max_rows=None if is_full else MAX_ROWS):
        yield Text(view.title, style="bold")
        yield rich_table(view)
        yield from (Text(note, style="dim") for note in view.notes)
        yield Text("")
    yield Text(COUNTED, style="dim")
    yield Text("")
    yield conditions(run)


def _findings(run: RunRecord, *, is_full: bool) -> Iterator[RenderableType]:
    measured, _ = _facts(run)
    findings = [*map(str, run.manifest.other_operations), *measured.findings]
    n_shown = len(findings) if is_full else MAX_FINDINGS
    if not findings:
        yield Text("capture: nothing is missing", style="green")
    yield from (bullets([plain(one)], "yellow") for one in findings[:n_shown])
    if len(findings) > n_shown:
        yield Text(f"  {len(findings) - n_shown} more with --full", "yellow")


def capture_sentence(facts: TraceFacts) -> str:
    """`Kineto: 1 file, 40,573 events, 3,774 ops on 1 device of 2 in 667 ms`."""
    nouns = {"file": facts.n_files, "event": facts.n_events, "op": facts.n_ops}
    counts = ", ".join(counted(n, noun) for noun, n in nouns.items())
    devices = counted(len(facts.devices), "device")
    of_all = "" if len(facts.devices) == facts.n_devices else f" of {facts.n_devices}"
    formats = joined([FORMATS.get(name, name) for name in facts.formats])
    return f"{formats}: {counts} on {devices}{of_all} in {format_seconds(facts.window_s)}"


def trace_tables(run: RunRecord, *, max_rows: int | None = None) -> Iterator[ViewTable]:
    """The steps and the load of devices, the collectives of each class of steps, the benchmarks."""
    measured, facts = _facts(run)
    if facts.steps:
        yield steps_view(measured, facts)
    if facts.programs:
        modules = {p.name: p.name.partition("(")[0] for p in facts.programs}
        are_distinct = len(set(modules.values())) == len(facts.programs)
        columns = {
            "program": lambda p: plain(modules[p.name] if are_distinct else p.name),
            "runs#": "n_runs",
            "collectives\ncompiled#": "n_collectives",
            "recorded\nas compiled#": "n_as_compiled",
            "with another\ncount#": lambda p: p.n_collectives - p.n_as_compiled - p.n_missing,
            "not\nrecorded#": "n_missing",
        }
        title = "programs, by the HLO in the trace"
        yield model.table_of(facts.programs, columns, title=title)
    rows = run.rows_of(Source.MEASURED)
    n_steps = {step.label: step.n_steps for step in facts.steps}
    for label in StepLabel:
        of_label = [row for row in rows if StepLabel.of_row(row.phase, row.axis_reason) is label]
        if of_label:
            yield collectives_view(
                label,
                of_label,
                n_steps=n_steps.get(label, 1),
                transfers=[time for time in facts.transfers if time.label is label],
                max_rows=max_rows,
            )
            predicted = [row for row in run.rows_of(Source.PREDICTED) if row.phase is label.phase]
            if predicted and label.phase is not None:
                yield predicted_view(label, of_label, predicted)
    times = {f"{name}_s": f"{name}_s" for name in ("mean", "p50", "p90", "p99")}
    for benchmark in facts.benchmarks:
        n = "" if benchmark.n_requests is None else f", {benchmark.n_requests:,} requests"
        yield model.table_of(
            benchmark.times,
            {"latency": lambda t: t.name.upper(), **times},
            title=f"serving benchmark {benchmark.path}{n}",
            notes=("measured by the client: queueing and the network included",),
        )


def steps_view(measured: Measured, facts: TraceFacts) -> ViewTable:
    """The classes of steps: number, device time, tokens, and the mean load of devices."""
    rows: list[tuple[CellValue, ...]] = []
    for step in facts.steps:
        fields = ("busy_s", "collective_s", "exposed_s")
        shares = [known(_share(measured, step.label, name)) for name in fields]
        tokens = (step.prefill_tokens, step.decode_tokens)
        counts = (EMPTY_LABEL if n is None else f"{n:,.0f}" for n in tokens)
        n_steps = None if step.label in {StepLabel.TRACE, StepLabel.OUTSIDE} else step.n_steps
        rows.append((step.label.value, n_steps, step.mean_s, step.p99_s, *counts, *shares))
    names = (
        *("steps", "n#", "mean_s", "p99_s", "prefill\ntokens#", "decode\ntokens#"),
        *("busy_frac", "in\ncollectives_frac", "exposed_frac"),
    )
    title = "steps: device time from the first op to the end of the last"
    return model.table(names, rows, title=title)


def _share(measured: Measured, label: StepLabel, seconds: str) -> float | None:
    """A field of the devices' loads in these steps, of their windows; None if it is unknown."""
    loads = [load for load in measured.loads if load.label is label]
    parts = [getattr(load, seconds) for load in loads]
    window_s = sum(load.window_s for load in loads)
    return None if None in parts or not window_s else sum(parts) / window_s


def collectives_view(
    label: StepLabel,
    rows: Sequence[Collective],
    *,
    n_steps: int,
    transfers: Sequence[TransferTime] = (),
    max_rows: int | None = None,
) -> ViewTable:
    """The collectives of a class of `n_steps` steps, those that take most time first."""
    ordered = sorted(rows, key=lambda row: -(row.dur_s or 0.0) * row.count * row.n_steps)
    shown = ordered[:max_rows]
    n_hidden = len(ordered) - len(shown)
    counts = {id(row): row.count * row.n_steps / n_steps for row in rows}
    n = round(sum(counts.values()))
    n_unsized = round(sum(counts[id(row)] for row in rows if row.wire_bytes is None))
    known = sum(float(row.wire_bytes or 0) * counts[id(row)] for row in rows)
    sent = f"{format_bytes(known)} sent"
    if n_unsized:
        sent = "bytes unknown" if n_unsized == n else f"{sent}, and {n_unsized:,} of unknown bytes"
    a_step = "" if label in {StepLabel.TRACE, StepLabel.OUTSIDE} else " per step"
    reasons = dict.fromkeys(
        (row.axis_reason or "").partition("; ")[0] for row in shown if row.axis is None
    )
    wire_s = {_transfer_key(time): time.wire_s for time in transfers}
    hidden = [f"{n_hidden} more with --full"] if n_hidden else []
    names = ("collective", "axis", "groups", "count#", "payload_bytes", "time_s", "exposed_s")
    return model.table(
        (*names, "busbw_bytes_per_s"),
        (_cells(row, counts[id(row)], wire_s.get(_transfer_key(row))) for row in shown),
        title=f"{label.value}: {counted(n, 'collective')}{a_step}, {sent}",
        notes=(*hidden, *(f"axis unknown: {reason}" for reason in reasons if reason)),
    )


def predicted_view(
    label: StepLabel, measured: Sequence[Collective], predicted: Sequence[Collective]
) -> ViewTable:
    """A mean step's collectives as the model predicts them, next to the trace's."""

    def payload(rows: Sequence[Collective]) -> CellValue:
        if any(row.payload_bytes is None for row in rows):
            return UNKNOWN_LABEL
        return sum((row.payload_bytes or 0) * row.count for row in rows) if rows else EMPTY_LABEL

    rows: list[tuple[CellValue, ...]] = []
    for kind, axis in dict.fromkeys((row.kind, row.axis) for row in (*predicted, *measured)):
        both = (measured, predicted)
        sides = [[r for r in side if (r.kind, r.axis) == (kind, axis)] for side in both]
        counts = (sum(row.count for row in side) for side in sides)
        rows.append((kind.value, axis or UNKNOWN_LABEL, *counts, *map(payload, sides)))
    names = product(("count#", "payload_bytes"), ("measured", "predicted"))
    return model.table(
        ("collective", "axis", *(f"{side}\n{what}" for what, side in names)),
        rows,
        title=f"{label.value}: measured beside predicted, a step of the mean tokens",
        notes=("predicted: by formulas for the model and plan, bf16; not read from the trace",),
    )


def _transfer_key(size: Collective | TransferTime) -> tuple[object, ...]:
    return (size.kind, size.axis, size.dtype, size.payload_bytes)


def _cells(row: Collective, count: float, wire_s: float | None) -> tuple[CellValue, ...]:
    dtype = f" {row.dtype}" if row.dtype else ""
    moved = row.payload_bytes if row.kind is Kind.RECV else row.wire_bytes
    moved_s = wire_s or row.dur_s
    return (
        f"{row.kind.value}{dtype}",
        axis_text(row),
        group_text(row),
        round(count) if count == round(count) else f"{count:,.1f}",
        known(row.payload_bytes),
        row.dur_s,
        row.exposed_s,
        known(float(moved) / moved_s if moved and moved_s else None),
    )


def _facts(run: RunRecord) -> tuple[Measured, TraceFacts]:
    measured = run.measured
    assert measured is not None
    assert measured.trace is not None
    return measured, measured.trace
