"""Speculative decoding of a run as text and as an entry of its JSON document."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.comparison import compare_sources
from meshscope.analysis.join import Agreement
from meshscope.analysis.request import SpeculativeStep, speculative_steps
from meshscope.analysis.totals import step_total
from meshscope.events.collective import Collective
from meshscope.events.enums import Source
from meshscope.events.step_time import TimeEstimate
from meshscope.reports.answer import agreements_of
from meshscope.reports.answer_text import collectives_lines
from meshscope.reports.model import ViewTable, table
from meshscope.reports.tables import labeled
from meshscope.serialize import picked
from meshscope.store.run import RunRecord
from meshscope.units import counted, format_bytes, format_gib, format_seconds

NOT_MEASURED = "acceptance is the stated one, not measured; the measured steps have random tokens"
_LABELS = ("", "TPOT, decode", "without", "verify", "draft", "draft memory")
_FITS = {True: "fits", False: "does NOT fit", None: "fit unknown"}


def speculation_lines(run: RunRecord) -> Iterator[RenderableType]:
    """Tokens a step, times, collectives and memory, a column for each source; whether sources agree."""
    steps, parts = speculative_steps(run), run.speculative
    if not steps or parts is None:
        return
    yield Text.assemble(("speculation", "bold"), f" {steps[-1].speculation}")
    sources, tpot, *rows = zip(_LABELS, *map(_cells, steps), strict=True)
    styled = [
        (row[0], *(Text(cell, style) for cell in row[1:]))
        for row, style in ((sources, "dim"), (tpot, "bold"))
    ]
    yield labeled([*styled[len(steps) == 1 :], *rows])  # the source of several
    if steps[-1].source is Source.MEASURED:
        yield Text(NOT_MEASURED, style="dim")
    for label, part in (("verify", parts.verify), ("draft", parts.draft)):
        for agreement in agreements_of(part):
            yield from collectives_lines(f"{label} {agreement.collectives}", agreement.agreement)
    yield Text("")


def speculation_table(run: RunRecord) -> ViewTable | None:
    """The same figures with a column for each source; None without speculation."""
    steps = speculative_steps(run)
    if not steps:
        return None
    sources, *rows = zip(_LABELS, *map(_cells, steps), strict=True)
    speculation = steps[-1].speculation
    drafted = f"{speculation.n_drafted} drafted by {speculation.draft_model or speculation.method}"
    head = f"{speculation.tokens_per_step:.2f} tokens per step: {drafted}"
    return table(sources, rows, title=f"{head}, acceptance {speculation.acceptance:g}")


def _cells(step: SpeculativeStep) -> Iterator[str]:
    """The source and the figures of a step, as `_LABELS` names them."""
    times = (step.plain, step.verify, step.draft)
    plain, verify, draft = (format_seconds(time.value_s) for time in times)
    verify_sent, draft_sent = (
        f"{counted(sent.count, 'collective')}, {format_bytes(sent.wire_bytes)} wire"
        for sent in map(step_total, (step.verify_rows, step.draft_rows))
    )
    yield from (step.source.value, format_seconds(step.tpot_s))
    yield f"{plain}, {step.gain:.2f} x as long"
    yield f"{verify}\n{verify_sent}"
    yield f"{step.speculation.n_passes} x {draft}\neach {draft_sent}"
    yield f"{format_gib(step.memory_bytes)} per device: {_FITS[step.fits]}"


def speculation_document(run: RunRecord) -> dict[str, Any]:
    """The entry `speculation` of the JSON document: the figures of the strongest source, then of each.

    Empty without speculation.
    """
    steps, parts = speculative_steps(run), run.speculative
    if not steps or parts is None:
        return {}
    speculation = steps[-1].speculation
    return {
        "speculation": {
            "method": speculation.method.value,
            **picked(speculation, "draft_model", "n_drafted", "acceptance", "tokens_per_step"),
            **_figures(steps[-1]),
            "sources": {step.source.value: _figures(step) for step in steps},
            "runs": {"verify": _part(parts.verify), "draft": _part(parts.draft)},
        }
    }


def _figures(step: SpeculativeStep) -> dict[str, Any]:
    def part(time: TimeEstimate, rows: tuple[Collective, ...]) -> dict[str, Any]:
        sent, interval = step_total(rows), picked(time, "low_s", "high_s")
        counts = {"n_collectives": sent.count, "wire_bytes": float(sent.wire_bytes)}
        return {"step_s": time.value_s, **interval, **counts}

    return {
        **picked(step, "step_s", "tpot_s", "gain"),
        "plain_step_s": step.plain.value_s,
        "verify": part(step.verify, step.verify_rows),
        "draft": part(step.draft, step.draft_rows),
        "draft_memory_bytes": step.memory_bytes,
        "fits": step.fits,
    }


def _part(run: RunRecord) -> dict[str, Any]:
    """The folder of a part, its memory by source, and whether its collectives agree (None: one source)."""
    comparison = compare_sources(run)
    return {
        "run": None if run.path is None else str(run.path),
        "memory": {
            source.value: picked(m, "temp_bytes", "total_bytes") for source, m in run.memory.items()
        },
        "collectives_agree": comparison and comparison.agreement is Agreement.EQUAL,
    }
