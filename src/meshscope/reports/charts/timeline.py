"""The timeline of one step on one device, and the span of one layer in it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from meshscope.analysis.catalog import MetricInputs
from meshscope.analysis.overlap import is_compute, timed
from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.analysis.timeline import COPY, last_step, read_folded
from meshscope.events.enums import Part, Phase, Source
from meshscope.events.measured import StepLabel
from meshscope.events.timeline import TIMELINE, unfolded
from meshscope.reports.charts import spec
from meshscope.reports.model import UNKNOWN_AXIS_LABEL, UNKNOWN_PHASE_LABEL, Unit, short
from meshscope.units import counted, format_seconds

MAX_SPANS = 20_000  # drawn spans of one phase; the shortest beyond are omitted
COLLECTIVE = "collective"
_OF_STAGE = " of stage "
_PIXEL = "((high-low)/width)"


class TimeSpan(NamedTuple):
    """An execution on a lane."""

    lane: str
    label: str
    start_s: float
    dur_s: float

    @property
    def color(self) -> str:
        """The name that decides the color: the part on the core lane, the axis of a collective."""
        lane = self.lane.partition(_OF_STAGE)[0]
        return spec.name_of(self.label.partition(",")[0] if lane == "core" else lane)


def step_charts(folder: Path | None, inputs: MetricInputs) -> list[spec.Chart]:
    """One step of each phase, modeled and measured, if the run folder stores a timeline.

    A measured step is the last profiled one on the first device. A step of no phase is `mixed`, or the
    whole `trace`. Shown at first is one layer, if layers are known.
    """
    tables = list(_measured(inputs))
    if folder is not None and (folder / TIMELINE).is_file():
        tables.insert(0, read_folded(folder).filter(pl.col("start_s").is_not_null()))
    charts: list[spec.Chart] = []
    for table in tables:
        for (source, phase), rows in table.group_by("source", "phase", maintain_order=True):
            classes = rows["step_class"] if "step_class" in rows.columns else rows["phase"]
            label = phase or next(iter(classes.drop_nulls()), UNKNOWN_PHASE_LABEL)
            charts.append(_chart_of_step(rows, str(source), str(label)))
    return charts


def _measured(inputs: MetricInputs) -> Iterator[pl.DataFrame]:
    """Measured executions with the columns of a modeled timeline, relative to the start of the step."""
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
    )


def _chart_of_step(rows: pl.DataFrame, source: str, phase: str) -> spec.Chart:
    every = unfolded(rows) if "repeats" in rows.columns else rows
    longest = every.sort("dur_s", descending=True, maintain_order=True).head(MAX_SPANS)
    spans = [_span(row) for row in longest.sort("start_s").iter_rows(named=True)]
    end_s = float(str((every["start_s"] + every["dur_s"]).max() or 0.0))
    n_hidden = len(every) - len(spans)
    hidden = f"The {n_hidden:,} shortest spans are not drawn." if n_hidden else ""
    ranks = {"core": 0, COPY: 2}  # the lanes from the top: the core, collectives, copies
    by_rank = [(ranks.get(lane.partition(_OF_STAGE)[0], 1), lane) for lane, *_ in spans]
    lanes = [lane for _, lane in sorted(set(by_rank))]
    heads = {StepLabel.TRACE.value: "The trace", Phase.STEP.value: "One step"}
    head = heads.get(phase, f"One {phase} step")
    layer, low_s, high_s = _middle_layer(every) or (None, 0.0, end_s)
    first = "" if layer is None else f"Shown first: layer {layer}; reset shows the whole step."
    return lanes_chart(
        spans, lanes, (low_s, high_s), end=end_s, title=f"{head} ({source})",
        name=f"timeline-{phase}{'-measured' if source == Source.MEASURED else ''}",
        description=f"{counted(len(spans), 'span')} in {format_seconds(end_s)}. {hidden}".strip(),
        note=" ".join(filter(None, (hidden, first))),
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
    )


def _middle_layer(rows: pl.DataFrame) -> tuple[int, float, float] | None:
    """A layer in the middle of the model, and the time from its first op to the first op of the next layer.

    What a program does for all layers at its end, such as writing caches, is outside. None if layers are unknown.
    """
    known = rows.filter(pl.col("layer").is_not_null(), pl.col("lane") != COPY)
    begins = known.group_by("layer").agg(pl.col("start_s").min()).sort("layer").rows()
    if not begins:
        return None
    layer, begin_s = begins[len(begins) // 2]
    once = known.filter(layer=layer).unique("hlo_name", keep="first", maintain_order=True)
    last_s = float(str((once["start_s"] + once["dur_s"]).max()))
    return layer, begin_s, min((s for _, s in begins if s > begin_s), default=last_s)


def lanes_chart(
    spans: Sequence[TimeSpan],
    lanes: Sequence[str],
    visible: tuple[float, float],
    *,
    end: float,
    **texts: str,
) -> spec.Chart:
    """Spans on lanes, the first at the top, between the parameters `low` and `high`.

    Of those that start in the same pixel of a lane and are narrower, one is drawn.
    """
    # Seven digits are finer than any chart shows.
    rows = [
        (
            *(lanes.index(one.lane), float(f"{one.start_s:.7g}"), float(f"{one.dur_s:.7g}")),
            *(short(one.label, 160), one.color),
        )
        for one in spans
    ]
    length, start = (spec.number_text(f"datum.{f}", Unit.SECONDS) for f in "dt")
    # Parts come in the order of the model, in every chart; then axes and copies as they appear.
    parts = [part.value for part in Part]
    colors = sorted((row[4] for row in rows), key=lambda name: [*parts, name].index(name))
    params = {"low": visible[0], "high": visible[1], "last": end}
    place = f"datum.d<{_PIXEL} ? floor(datum.t/{_PIXEL}) : -1-datum.t"
    return spec.chart(
        "timeline",
        **{"description": "", "note": "", **texts},
        spans=spec.columnar("lane t d label color", rows),
        lanes=[{"lane": i, "name": spec.name_of(name)} for i, name in enumerate(lanes)],
        places=list(range(len(lanes))),
        labels=spec.number_text("datum.value", Unit.SECONDS),
        color=spec.color_by("color", colors),
        params=[{"name": name, "value": value} for name, value in params.items()],
        transforms=[
            {"flatten": ["lane", "t", "d", "label", "color"]},
            {"filter": "datum.t+datum.d>=low && datum.t<=high"},
            {"calculate": place, "as": "place"},
            {"window": [{"op": "row_number", "as": "nth"}], "groupby": ["lane", "place"]},
            {"filter": "datum.nth===1"},
            {"calculate": f"datum.t+max(datum.d,0.6*{_PIXEL})", "as": "end"},
            {"calculate": f"datum.label+'\\n'+{length}+' from '+{start}", "as": "tip"},
        ],
    )  # fmt: skip
