"""Several runs side by side: a row each, step times against devices, and why they differ."""

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from meshscope.analysis.explanation import explain
from meshscope.analysis.metric import Unavailable
from meshscope.analysis.sides import Side
from meshscope.events.enums import Phase
from meshscope.units import format_gib, format_seconds
from meshscope.views.explanation import sentences
from meshscope.views.html.blocks import (
    Block,
    Cell,
    Panel,
    Paragraph,
    Section,
    basis_words,
    cell,
    figure,
    shown,
    table_of_rows,
    text_cell,
    unknown,
)
from meshscope.views.html.cost import modelled
from meshscope.views.html.drawing import Charts, between
from meshscope.views.html.headline import strongest_costs
from meshscope.views.html.side import PageRun


def plans_section(runs: Sequence[PageRun], new: Charts) -> Section:
    """The runs as rows, their step times against devices, and what makes each differ from the first."""
    blocks: list[Block] = []
    if len(runs) > 1:
        blocks += [_plans(runs), _requests(runs)]
        blocks += _scaling_chart(runs, new)
        blocks += [block for run in runs[1:] for block in _why(runs[0], run)]
    else:
        blocks.append(
            Paragraph(
                text="There is one run. Give `meshscope report` several, and they stand side by side.",
                class_name="unknown",
            )
        )
    return Section(
        id="plans",
        title="Plans side by side",
        lead="",
        panels=(Panel(title="", blocks=tuple(blocks)),),
    )


def _plans(runs: Sequence[PageRun]) -> Block:
    names = ("run", "model", "plan", "slice", "devices", "source", "prefill step", "decode step")
    more = ("sent, prefill", "sent, decode", "memory", "fits")
    return table_of_rows("plans-table", "Plans", (*names, *more), map(_plan_row, runs))


def _plan_row(run: PageRun) -> list[Cell]:
    experiment = run.run.manifest.experiment
    topology = experiment.topology
    costs = strongest_costs(run)
    memory = run.run.memory.get(run.source)
    total_bytes = None if memory is None else memory.total_bytes
    return [
        Cell(text=run.letter),
        Cell(text=shown(experiment.model_name or "not known", 80)),
        Cell(text=shown(experiment.plan or "not known", 40)),
        Cell(text="not known" if topology is None else shown(topology.name, 40)),
        cell("n_devices", experiment.n_devices),
        Cell(text=run.source.value),
        *(cell("step_s", costs[p].step_s if p in costs else None) for p in Phase),
        *(cell("wire_bytes", _sent(run, phase)) for phase in Phase),
        Cell(text="not known")
        if total_bytes is None
        else figure(format_gib(total_bytes), total_bytes),
        cell("fits", None if memory is None else memory.fits),
    ]


def _why(first: PageRun, other: PageRun) -> Iterator[Block]:
    """What makes the difference between the first run and another, in sentences."""
    left, right = (Side(name=r.letter, run=r.run, source=r.source) for r in (first, other))
    yield Paragraph(text=f"{other.letter} against {first.letter}", class_name="heading")
    for sentence in sentences(explain(left, right)):
        yield Paragraph(text=shown(sentence, 800), class_name="say")


def _requests(runs: Sequence[PageRun]) -> Block:
    """TTFT, TPOT and end to end of every run, with interval and basis."""
    names = ("TTFT", "between", "TPOT", "between", "end to end", "between", "basis")
    rows = [[Cell(text=run.letter), *_request_cells(run)] for run in runs]
    return table_of_rows("requests-table", "Time of a request", ("run", *names), rows)


def _request_cells(run: PageRun) -> list[Cell]:
    latency = run.subject.latency
    if latency is not None:
        spreads = (latency.ttft, latency.tpot, latency.e2e)
        cells = [
            c
            for spread in spreads
            for c in (
                cell("mean_s", None if spread is None else spread.mean_s),
                Cell(text="-"),
            )
        ]
        return [*cells, Cell(text="measured")]
    document = modelled(run)
    if document is None:
        return [Cell(text="-")] * 6 + [Cell(text="not known")]
    cells = []
    for key in ("ttft_s", "tpot_s", "e2e_s"):
        bounds = document["intervals"].get(key, (None, None))
        cells += [cell(key, document[key]), Cell(text=between(*bounds))]
    return [*cells, text_cell(basis_words(document["basis"]))]


def _sent(run: PageRun, phase: Phase) -> float | None:
    """Wire bytes of one step of the phase, by the metric."""
    found = run.of_strongest("volume")
    if isinstance(found, Unavailable):
        return None
    own = found.filter(pl.col("phase") == phase.value)["wire_bytes"]
    return float(own.sum()) if len(own) else None


def _scaling_chart(runs: Sequence[PageRun], new: Charts) -> Iterator[Block]:
    lines: list[dict[str, Any]] = []
    for phase in Phase:
        points = [
            [run.letter, run.subject.n_devices, costs[phase].step_s]
            for run in runs
            if run.subject.n_devices and phase in (costs := strongest_costs(run))
        ]
        if len({n for _, n, _ in points}) > 1:
            ordered = sorted(points, key=lambda point: (point[1], point[2]))
            lines.append({"name": f"{phase} step", "points": ordered})
    for line in lines:
        yield new.new(
            "scaling",
            f"{str(line['name']).capitalize()} against devices",
            {"unit": "s", "lines": [line]},
            about="; ".join(
                f"{a} on {n} devices {format_seconds(s)}" for a, n, s in line["points"]
            ),
            note="The line joins the fastest run of each size. Dashed: the time of the smallest divided by as many devices more.",
        )
    if not lines:
        yield unknown(
            "step times against devices: the runs use equally many devices, or have no times"
        )
