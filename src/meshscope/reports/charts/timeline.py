"""The timeline of one step on one device, the span of one layer in it, and bursts of traffic."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.analysis.catalog import MetricInputs, executions
from meshscope.analysis.overlap import bursts, is_compute, placed, timed
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.analysis.timeline import COPY, last_step, read_folded
from meshscope.events.enums import Part, Phase, Source
from meshscope.events.measured import StepLabel
from meshscope.events.timeline import TIMELINE
from meshscope.reports.charts import spec
from meshscope.reports.model import UNKNOWN_AXIS_LABEL, UNKNOWN_PHASE_LABEL, Unit, short
from meshscope.reports.words import counted
from meshscope.units import format_seconds

MAX_SPANS = 6_000  # drawn spans of one phase; the shortest beyond are omitted
MAX_BURSTS = 1_000
COLLECTIVE = "collective"
_OF_STAGE = " of stage "
LOOP = "An iteration is one layer, or several layers of different kinds that recur together; the first and last layers may be outside the loop. A copy lane shows each copy between memories."


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpan:
    """An execution on a lane; `repeats` are (iterations, period in seconds), the outermost loop first."""

    lane: str
    label: str
    start_s: float
    dur_s: float
    repeats: tuple[tuple[int, float], ...] = ()

    @property
    def n(self) -> int:
        """Number of executions in the step."""
        return prod(n for n, _ in self.repeats)

    @property
    def end_s(self) -> float:
        """End of the last repetition."""
        return self.start_s + sum((n - 1) * period for n, period in self.repeats) + self.dur_s


def _without_stage(lane: str) -> str:
    """The lane's resource: `core` for the lane `core of stage 1`."""
    return lane.partition(_OF_STAGE)[0]


def step_charts(
    folder: Path | None, inputs: MetricInputs
) -> list[tuple[spec.Chart, spec.Chart | None]]:
    """One step of each phase, modeled and measured, if the run folder stores a timeline; each with its detail.

    A measured step is the last profiled one on the first device. A step of no phase is `mixed`, or the
    whole `trace`. The detail is the span of one layer, or one repetition of the layers; None if unknown.
    """
    tables = list(_measured(inputs))
    if folder is not None and (folder / TIMELINE).is_file():
        tables.insert(0, read_folded(folder).filter(pl.col("start_s").is_not_null()))
    charts: list[tuple[spec.Chart, spec.Chart | None]] = []
    for table in tables:
        for (source, phase), rows in table.group_by("source", "phase", maintain_order=True):
            classes = rows["step_class"] if "step_class" in rows.columns else rows["phase"]
            label = phase or next(iter(classes.drop_nulls()), UNKNOWN_PHASE_LABEL)
            charts.append(_charts_of_step(rows, str(source), str(label), inputs))
    return charts


def _measured(inputs: MetricInputs) -> Iterator[pl.DataFrame]:
    """Measured executions in the schema of a folded timeline, relative to the start of the step."""
    if inputs.timeline is None:
        return
    is_measured = pl.col("source") == Source.MEASURED.value
    steps = last_step(timed(inputs.timeline.filter(is_measured)))
    first_device = steps.filter(pl.col("device").eq_missing(pl.col("device").min().over("phase")))
    if first_device.is_empty():
        return
    is_collective = pl.col("kind").is_not_null()
    lane = pl.when(is_collective).then(pl.lit(COLLECTIVE)).when(is_compute()).then(pl.lit("core"))
    is_shown = is_collective | is_compute() | (pl.col("opcode") == COPY)
    yield first_device.filter(is_shown).with_columns(
        lane.otherwise(pl.lit(COPY)).alias("lane"),
        pl.col("start_s") - pl.col("start_s").min().over("phase"),
        pl.lit(None).alias("stage"),  # the one device's
        pl.lit([], pl.List(pl.Int64)).alias("repeats"),
        pl.lit([], pl.List(pl.Float64)).alias("periods_s"),
    )


def _charts_of_step(
    rows: pl.DataFrame, source: str, phase: str, inputs: MetricInputs
) -> tuple[spec.Chart, spec.Chart | None]:
    is_repeated = rows["repeats"].list.len() > 0
    single = rows.filter(~is_repeated)  # a measured step may have many
    longest = single.sort("dur_s", descending=True, maintain_order=True).head(MAX_SPANS)
    all_spans = [_span(row) for row in rows.filter(is_repeated).iter_rows(named=True)]
    all_spans += [_span(row) for row in longest.iter_rows(named=True)]
    kept = sorted(all_spans, key=lambda span: -span.dur_s)[:MAX_SPANS]
    spans = sorted(kept, key=lambda span: span.start_s)
    last_s = float(str((single["start_s"] + single["dur_s"]).max() or 0.0))
    end_s = max(last_s, *(span.end_s for span in all_spans), 0.0)
    n = sum(span.n for span in spans)
    n_hidden = len(single) - len(longest) + sum(span.n for span in all_spans) - n
    hidden = f"The {n_hidden:,} shortest spans are not drawn." if n_hidden else ""
    ranks = {"core": 0, COPY: 2}  # the lanes from the top: the core, collectives, copies
    lanes = sorted(
        {span.lane for span in spans}, key=lambda lane: (ranks.get(_without_stage(lane), 1), lane)
    )
    heads = {StepLabel.TRACE.value: "The trace", Phase.STEP.value: "One step"}
    head = heads.get(phase, f"One {phase} step")
    name = f"timeline-{phase}{'-measured' if source == Source.MEASURED else ''}"
    whole = lanes_chart(
        spans, lanes, (0.0, end_s), end=end_s, name=name, title=f"{head} ({source})", note=hidden,
        description=f"{counted(n, 'span')} in {format_seconds(end_s)}. {hidden}".strip(),
    )  # fmt: skip
    layer = _layer_in_loop(rows.filter(is_repeated))
    layer = layer or _layer_between_collectives(inputs, source, phase)
    if layer is None:
        return whole, None
    label, first_s, after_s = layer
    return whole, lanes_chart(
        spans, lanes, (first_s, after_s), end=end_s, name=f"{name}-layer",
        title=f"Detail of {phase} ({source}): {label}",
        description=f"From {format_seconds(first_s)} to {format_seconds(after_s)} of the step",
        note=LOOP if "loop over layers" in label else "",
    )  # fmt: skip


def _span(row: dict[str, Any]) -> TimeSpan:
    is_collective = row["lane"] == COLLECTIVE
    name = row["kind"] if is_collective else row["part"] or BETWEEN_PARTS
    lane = row["axis"] or UNKNOWN_AXIS_LABEL if is_collective else row["lane"]
    names = (name, row["part"] if is_collective else None, row["hlo_name"] or row.get("opcode"))
    return TimeSpan(
        lane=str(lane) if row["stage"] is None else f"{lane}{_OF_STAGE}{row['stage']}",
        label=", ".join(str(name) for name in names if name),
        start_s=row["start_s"],
        dur_s=row["dur_s"],
        repeats=tuple(zip(row["repeats"], row["periods_s"], strict=True)),
    )


def _layer_in_loop(rows: pl.DataFrame) -> tuple[str, float, float] | None:
    """The second repetition of the longest loop, which runs the layers.

    A loop that contains the embedding is one over chunks of a prompt.
    """
    spans = [
        (row["part"], row["start_s"], tuple(zip(row["repeats"], row["periods_s"], strict=True)))
        for row in rows.iter_rows(named=True)
    ]
    of_chunks = {loop for part, _, loops in spans if part == Part.EMBED for loop in loops}
    in_loops = [(start_s, [n for n in loops if n not in of_chunks]) for _, start_s, loops in spans]
    outermost = [(loops[0], start_s) for start_s, loops in in_loops if loops and loops[0][0] > 1]
    if not outermost:
        return None
    times, period_s = longest = max((loop for loop, _ in outermost), key=prod)
    start_s = min(start_s for loop, start_s in outermost if loop == longest) + period_s
    return f"iteration 2 of {times} of the loop over layers", start_s, start_s + period_s


def _layer_between_collectives(
    inputs: MetricInputs, source: str, phase: str
) -> tuple[str, float, float] | None:
    """A middle layer, from the end of the previous layer's last collective to the end of its own."""
    rows = inputs.events.filter(
        pl.col("source") == source,
        pl.col("phase") == phase,
        pl.col("layer").is_not_null(),
        pl.col("start_s").is_not_null(),
        pl.col("dur_s").is_not_null(),
        pl.col("count") == 1,
    )
    ends = rows.group_by("layer").agg((pl.col("start_s") + pl.col("dur_s")).max()).sort("layer")
    by_layer = dict(ends.iter_rows())
    pairs = [layer for layer in by_layer if layer + 1 in by_layer]
    if not pairs:
        return None
    before = pairs[(len(pairs) - 1) // 2]
    return f"layer {before + 1}", by_layer[before], by_layer[before + 1]


def burst_charts(inputs: MetricInputs, source: Source, *, min_axes: int = 1) -> list[spec.Chart]:
    """The bursts of each axis in each phase on its own lane, on the first device of the first stage.

    Empty if bursts are of fewer than `min_axes` axes.
    """
    rows = executions(inputs).filter(pl.col("source") == source.value)
    is_first = [pl.col(c).is_null() | (pl.col(c) == pl.col(c).min()) for c in ("stage", "device")]
    # Measured times count from the start of the trace, modeled ones from the start of the step.
    begin = pl.when(pl.col("device").is_null()).then(0.0)
    first = begin.otherwise(pl.col("begin").min().over("phase"))
    merged = bursts(placed(rows)).filter(*is_first) if len(rows) else pl.DataFrame()
    charts: list[spec.Chart] = []
    axes = set[str]()
    if merged.is_empty():
        return charts
    relative = merged.with_columns(pl.col("begin") - first, pl.col("end") - first)
    for (phase, unit), part in relative.group_by("phase", "unit", maintain_order=True):
        drawn = part.head(MAX_BURSTS).select("axis", "begin", "end", "wire_bytes").iter_rows()
        spans = [
            TimeSpan(lane=lane, label=f"{spec.name_of(lane)}: {n_bytes:,.0f} B", start_s=begin, dur_s=end - begin)
            for axis, begin, end, n_bytes in drawn
            for lane in [axis or UNKNOWN_AXIS_LABEL]
        ]  # fmt: skip
        lanes = list(dict.fromkeys(span.lane for span in spans))
        axes.update(lanes)
        n, last = len(spans), float(str(part["end"].max()))
        more = f"Only the first {n:,} bursts are drawn; {len(part) - n:,} follow."
        hidden = more if len(part) > n else ""
        order = "" if unit == "s" else "The x axis is the position in the schedule, not time."
        label = phase or UNKNOWN_PHASE_LABEL
        charts.append(
            lanes_chart(
                spans, lanes, (0.0, last), end=last, name=f"intervals-{label}",
                unit=Unit.SECONDS if unit == "s" else Unit.NUMBER,
                title=f"Bursts of each axis in one {label} step",
                description=f"{counted(n, 'burst')}. {hidden}".strip(),
                note=" ".join(filter(None, (hidden, order))),
            )
        )  # fmt: skip
    return charts if len(axes) >= min_axes else []


def lanes_chart(
    spans: Sequence[TimeSpan],
    lanes: Sequence[str],
    visible: tuple[float, float],
    *,
    end: float,
    unit: Unit = Unit.SECONDS,
    **texts: str,
) -> spec.Chart:
    """Spans on lanes, the first at the top, between the parameters `low` and `high`.

    Loops are unfolded in the visible range; iterations narrower than a pixel and a half are one bar.
    """
    depth = max((len(span.repeats) for span in spans), default=0)
    loops = [f"{letter}{i}" for i in range(depth) for letter in "np"]
    columns = " ".join(["lane", "t", "d", "label", "color", *loops])
    rows = [
        (
            *(lanes.index(span.lane), _brief(span.start_s), _brief(span.dur_s)),
            *(short(span.label, 160), _color(span)),
            *(v for n, period in span.repeats for v in (n, _brief(period))),
            *[0] * (2 * (depth - len(span.repeats))),
        )
        for span in spans
    ]
    length, start = (spec.number_text(f"datum.{f}", unit, digits=8 if depth else 6) for f in "dt")
    # Parts come in the order of the model, in every chart; then axes and copies as they appear.
    parts = [part.value for part in Part]
    colors = sorted((row[4] for row in rows), key=lambda name: [*parts, name].index(name))
    params = {"low": visible[0], "high": visible[1], "last": end}
    return spec.chart(
        "timeline",
        **{"description": "", "note": "", **texts},
        spans=spec.columnar(columns, rows),
        lanes=[{"lane": i, "name": spec.name_of(name)} for i, name in enumerate(lanes)],
        places=list(range(len(lanes))),
        labels=spec.number_text("datum.value", unit),
        color=spec.color_by("color", colors),
        params=[{"name": name, "value": value} for name, value in params.items()],
        transforms=[
            {"flatten": columns.split()},
            *(_thinned(*loops) if depth else ()),  # before they are unfolded, for speed
            *(step for i in range(depth) for step in _unfolded(i, depth)),
            {"filter": "datum.t+datum.d>=low && datum.t<=high"},
            *_thinned(),
            {"calculate": f"datum.t+max(datum.d,0.6*{_PIXEL})", "as": "end"},
            {"calculate": f"datum.label+'\\n'+(datum.times>1 ? format(datum.times,',')+' loop iterations in '+{length}+'; zoom in to see them' : {length}+' from '+{start})", "as": "tip"},
        ],
    )  # fmt: skip


_PIXEL = "((high-low)/width)"


def _thinned(*loops: str) -> Iterable[spec.Layer]:
    """Keeps one of the spans of a lane and loop that start in the same pixel and are narrower."""
    place = f"datum.d<{_PIXEL} ? floor(datum.t/{_PIXEL}) : -1-datum.t"
    yield {"calculate": place, "as": "place"}
    first = [{"op": "row_number", "as": "nth"}]
    yield {"window": first, "groupby": ["lane", "place", *loops]}
    yield {"filter": "datum.nth===1"}


def _unfolded(at: int, depth: int) -> Iterable[spec.Layer]:
    """The transforms that make rows of the visible iterations of a loop, or one row of all."""
    n, period = f"datum.n{at}", f"datum.p{at}"
    inner = "".join(f"+max(datum.n{i}-1,0)*datum.p{i}" for i in range(at + 1, depth))
    whole = f"(({n}-1)*{period}+datum.d{inner})"
    is_fine = f"{period}>0 && {period}<1.5*{_PIXEL}"
    first = f"max(0,ceil((low-datum.t-(datum.d{inner}))/{period}))"
    after = f"min({n}-1,floor((high-datum.t)/{period}))+1"
    times = "*".join(f"max(datum.n{i},1)" for i in range(at, depth))
    yield {"calculate": f"{period}>0 && !({is_fine}) ? sequence({first},{after}) : [0]", "as": "i"}
    yield {"flatten": ["i"]}
    yield {"calculate": f"datum.t+datum.i*{period}", "as": "t"}
    yield {"calculate": f"{is_fine} ? {times} : datum.times", "as": "times"}
    yield {"calculate": f"{is_fine} ? {whole} : datum.d", "as": "d"}
    for i in range(at + 1, depth):
        yield {"calculate": f"datum.times>1 ? 0 : datum.p{i}", "as": f"p{i}"}


def _color(span: TimeSpan) -> str:
    """The name that decides the color: the part on the core lane, the axis of a collective."""
    lane = _without_stage(span.lane)
    return spec.name_of(span.label.partition(",")[0] if lane == "core" else lane)


def _brief(value: float) -> float:
    """The value with seven digits, which is finer than any chart shows."""
    return float(f"{value:.7g}")
