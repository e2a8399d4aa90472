"""The measurements of a live run: latency, setup, generated text, and caveats."""

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.comparison import n_promoted_collectives, runs_on_cpu
from meshscope.analysis.request import (
    Latency,
    Spread,
    request_latency,
    step_spreads,
)
from meshscope.events.enums import Phase
from meshscope.events.measured import Measured
from meshscope.reports.model import ViewTable, joined, plain, table
from meshscope.reports.tables import rich_table
from meshscope.reports.words import counted
from meshscope.store.run import RunRecord
from meshscope.units import format_rate, format_seconds

MAX_FINDINGS = 8  # printed lines; the rest is counted

PROMOTED = (
    "XLA performs 16-bit collectives in float32 on CPU devices. The prediction is compared as float32, "
    "with twice the bytes. TPUs keep 16 bits; --dtype f32 avoids the promotion."
)
SHARED_CORES = (
    "virtual devices share the cores of this machine: durations show that the run works, "
    "not what a plan costs"
)


def live_lines(run: RunRecord) -> Iterator[RenderableType]:
    """Findings about the profile, the latency of the timed requests, and the generated text."""
    measured, latency, steps = run.measured, request_latency(run), step_spreads(run)
    if measured is None or (latency is None and not steps):
        return
    yield from _notes(run, measured)
    yield Text("")
    if latency is None:
        of_phases = {phase.value: spread for phase, spread in steps.items()}
        yield rich_table(_spreads_view("time of steps", of_phases))
    else:
        yield rich_table(latency_view(latency))
        rates = {
            "request tokens/s": latency.output_tokens_per_s,
            "prompt tokens/s in prefill": latency.prefill_tokens_per_s,
            "decode tokens/s": latency.decode_tokens_per_s,
        }
        known = (f"{format_rate(rate)} {unit}" for unit, rate in rates.items() if rate is not None)
        yield Text(f"throughput: {', '.join(known)}")
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


def _notes(run: RunRecord, measured: Measured) -> Iterator[Text]:
    steps = joined(
        [
            counted(n, "step" if p is Phase.STEP else f"{p} step")
            for p, n in measured.n_profiled_steps.items()
        ]
    )
    findings = measured.findings
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


def latency_view(latency: Latency) -> ViewTable:
    """Mean, percentiles and count of each duration over the timed requests."""
    spreads = {
        "TTFT, to the first token": latency.ttft,
        "TPOT, per later token of a request": latency.tpot,
        "ITL, from token to token": latency.itl,
        "end to end": latency.e2e,
    }
    return _spreads_view("time of requests", spreads)


def _spreads_view(title: str, spreads: Mapping[str, Spread | None]) -> ViewTable:
    known = ((name, spread) for name, spread in spreads.items() if spread is not None)
    rows = ((name, s.mean_s, s.p50_s, s.p90_s, s.p99_s, s.n) for name, s in known)
    return table((title, "mean_s", "p50_s", "p90_s", "p99_s", "n#"), rows)
