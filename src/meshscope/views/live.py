"""What a run on live devices tells beside its collectives: latency, load, waiting, and what to distrust."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshscope.analysis.latency import Latency, Spread
from meshscope.analysis.roofline import rooflines
from meshscope.events.enums import Phase
from meshscope.events.measured import CollectiveTime, DeviceLoad, Measured
from meshscope.spec.experiment_record import LayerForm
from meshscope.store.run import RunRecord
from meshscope.units import format_seconds
from meshscope.views.document import is_on_cpu, run_chip, run_latency, run_promotion
from meshscope.views.plain import plain
from meshscope.views.tables import new_table

MAX_FINDINGS = 8  # lines; the others are counted

PROMOTED = (
    "XLA carries 16-bit collectives out in float32 on CPU devices: predicted is compared as float32, "
    "with twice the bytes. On TPUs they stay 16-bit; --dtype f32 compares without this."
)
LOOPED = (
    "bytes and flops of a step are not told: the layers are a loop, and the compiler counts its body "
    "once. Run with --loop unroll."
)
UNTOLD = (
    "bytes and flops of a step are not told: torch_xla does not hand on the compiler's account."
)
SHARED_CORES = (
    "virtual devices share the cores of this machine: durations show that the plumbing works, "
    "not what a plan costs"
)


def live_lines(run: RunRecord) -> Iterator[RenderableType]:
    """Faults of the profile first, then latency, load and waiting."""
    measured, latency = run.measured, run_latency(run)
    if measured is None or latency is None:
        return
    yield from _notes(run, measured)
    yield Text("")
    yield latency_table(latency)
    yield from map(Text, _rate_lines(run, latency))
    yield Text("")
    yield from _load_lines(measured)
    yield from _roofline_lines(run, measured, latency)
    yield Text("")
    if measured.texts:
        yield Text("text", style="bold")
        yield from (Text(f"  {plain(text)}") for text in measured.texts)
        yield Text("")


def _notes(run: RunRecord, measured: Measured) -> Iterator[Text]:
    steps = " and ".join(
        f"{n} {phase} step{'' if n == 1 else 's'}" for phase, n in measured.n_profiled_steps.items()
    )
    if not measured.findings:
        yield Text(f"profile: {steps}; every collective of every device is in it", style="green")
    else:
        n = len(measured.findings)
        head = f"profile: {steps}; {n} finding{'' if n == 1 else 's'} to read before its figures"
        yield Text(head, style="bold red")
        yield from (Text(f"  {plain(words)}") for words in measured.findings[:MAX_FINDINGS])
        if n > MAX_FINDINGS:
            yield Text(f"  and {n - MAX_FINDINGS} more, in metrics.json")
    if run_promotion(run):
        yield Text(PROMOTED, style="yellow")
    if is_on_cpu(run):
        yield Text(f"note: {SHARED_CORES}", style="yellow")


def latency_table(latency: Latency) -> Table:
    """Spread of each duration over the timed requests."""
    table = new_table("time of requests", "mean", "p50", "p90", "p99", "n")
    for name, spread in (
        ("TTFT, to the first token", latency.ttft),
        ("TPOT, of a request's tokens after it", latency.tpot),
        ("ITL, from token to token", latency.itl),
        ("end to end", latency.e2e),
    ):
        if spread is not None:
            table.add_row(name, *_spread_cells(spread))
    return table


def _spread_cells(spread: Spread) -> list[str]:
    seconds = (spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s)
    return [*(format_seconds(value) for value in seconds), str(spread.n)]


def _rate_lines(run: RunRecord, latency: Latency) -> Iterator[str]:
    parts = [
        f"{_rate(latency.output_tokens_per_s)} output tokens/s end to end",
        f"{_rate(latency.prefill_tokens_per_s)} prompt tokens/s in prefill",
    ]
    if latency.decode_tokens_per_s is not None:
        parts.append(f"{_rate(latency.decode_tokens_per_s)} tokens/s in decode")
    yield f"throughput: {', '.join(parts)}"
    seconds = run.manifest.seconds
    compiles = {name: seconds.get(f"{name}.compile") for name in Phase}
    told = [f"{name} {format_seconds(s)}" for name, s in compiles.items() if s is not None]
    before = [
        f"{n.replace('_', ' ')} {format_seconds(seconds[n])}"
        for n in ("weights", "warm_up")
        if n in seconds
    ]
    yield f"before, not in these figures: compile {', '.join([*told, *before])}"


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}" if per_s < 1000 else f"{per_s:,.0f}"


def _load_lines(measured: Measured) -> Iterator[RenderableType]:
    """One line a phase: what a device did in a step, over devices; and who waited for whom."""
    table = new_table(
        "profiled",
        "window\na step",
        "busy",
        "in\ncollectives",
        "of it\nwaiting",
        "idle",
        "busiest\ndevice",
    )
    for phase, n_steps in measured.n_profiled_steps.items():
        own = [load for load in measured.loads if load.phase is phase]
        if own:
            table.add_row(phase.value, *_load_cells(own, n_steps))
    if table.row_count:
        yield table
    for phase in measured.n_profiled_steps:
        own_times = [time for time in measured.times if time.phase is phase]
        if own_times:
            yield Text(f"{phase}: {_slowest_words(own_times)}")


def _roofline_lines(
    run: RunRecord, measured: Measured, latency: Latency
) -> Iterator[RenderableType]:
    """Bytes and flops of a step, as the compiler counts them, against the chip's published peaks."""
    chip = run_chip(run)
    steps = {Phase.PREFILL: latency.ttft.mean_s}
    if latency.itl is not None:
        steps[Phase.DECODE] = latency.itl.mean_s
    found = rooflines(measured.costs, steps, chip) if chip is not None else []
    if chip is not None and chip.hbm_bytes_per_s is not None and not measured.costs:
        is_loop = run.manifest.experiment.layers_are is LayerForm.SCANNED
        yield Text(LOOPED if is_loop else UNTOLD, style="dim")
    if not found or chip is None:
        return
    yield Text("")
    table = new_table(
        "one step of a device", "time", "bytes", "of HBM peak", "flops", "of bf16 peak"
    )
    for line in found:
        cells = (_amount(line.accessed_bytes, "B"), _share(line.hbm_frac))
        flops = (_amount(line.flops, "flop"), _share(line.flops_frac))
        table.add_row(line.phase.value, format_seconds(line.step_s), *cells, *flops)
    yield table
    yield Text(f"peaks of one {chip.name}: {chip.source}", style="dim")


def _amount(value: float | None, unit: str) -> str:
    return "not known" if value is None else f"{value:.3g} {unit}"


def _share(frac: float | None) -> str:
    return "not known" if frac is None else f"{frac:.1%}"


def _load_cells(loads: Sequence[DeviceLoad], n_steps: int) -> list[str]:
    """Mean and, in brackets, the range over devices; shares of the window."""
    busiest = max(loads, key=lambda load: load.busy_s)
    waits = [load.wait_s / load.window_s for load in loads if load.wait_s is not None]
    return [
        format_seconds(loads[0].window_s / n_steps),
        _shares([load.busy_s / load.window_s for load in loads]),
        _shares([load.collective_s / load.window_s for load in loads]),
        _shares(waits) if waits else "not known",
        _shares([load.idle_s / load.window_s for load in loads]),
        str(busiest.device),
    ]


def _shares(fracs: Sequence[float]) -> str:
    mean = sum(fracs) / len(fracs)
    if len(fracs) == 1:
        return f"{mean:.0%}"
    return f"{mean:.0%} ({min(fracs):.0%}-{max(fracs):.0%})"


def _slowest_words(times: Sequence[CollectiveTime]) -> str:
    """The collectives that took most of the time: the wire, and waiting for the slowest."""
    worst = max(times, key=lambda time: time.dur_s * time.n_executions)
    where = " ".join(
        filter(None, (worst.part, worst.kind, f"over {worst.axis}" if worst.axis else ""))
    )
    told = f"most time in {where}: {format_seconds(worst.dur_s)} each"
    if worst.wait_s is None:
        return f"{told}; how much of it is waiting is not known"
    return (
        f"{told}, {format_seconds(worst.wire_s)} of the fastest participant, "
        f"{format_seconds(worst.wait_s)} waiting for the slowest"
    )
