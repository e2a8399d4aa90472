"""Charts as Vega-Lite specifications, drawn alike by the report, the notebook and `export --to plots`.

A color is a variable of the page's style, such as `var(--blue)`, so that a chart follows the theme;
`pictures.py` replaces the variables with the colors of the light theme. Chart widths are numbers,
which the page replaces with the window's unless `is_fixed`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10
from typing import Any, ClassVar, NamedTuple

from meshscope.reports.model import Unit, short
from meshscope.units import format_bytes, format_seconds

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
WIDTH = 640  # pixels of a picture
MAX_NAME = 80  # characters of a name in a chart
TIP = {"field": "tip"}

Layer = dict[str, Any]

# The Okabe-Ito palette, safe for color-blind readers: the style of the page in its light theme.
PALETTE = {
    "ink": "#1d2330", "soft": "#5c6475", "faint": "#e6e4df", "line": "#cfccc5", "card": "#ffffff",
    "heat": "#08306b", "blue": "#0072b2", "sky": "#56b4e9", "orange": "#e69f00", "red": "#d55e00",
    "green": "#009e73", "pink": "#cc79a7", "yellow": "#c9b900", "gray": "#9aa0ab",
    "indigo": "#4b3f8f", "olive": "#8a8a2e",
}  # fmt: skip
INK, SOFT, CARD, HEAT = (f"var(--{name})" for name in ("ink", "soft", "card", "heat"))
CYCLE = ("red", "orange", "yellow", "green", "pink", "sky", "indigo", "olive")
# Names with the same color in every chart; axes of a mesh and others take CYCLE in order.
FIXED = {
    "compute": "blue", "waiting for memory": "sky", "copy": "gray", "waiting for stages": "pink",
    "idle": "gray", "other plans": "gray", "collectives, hidden or not": "red", "no breakdown": "gray", "step": "gray",
    "weights": "blue", "KV cache": "orange", "arguments": "blue", "outputs": "orange",
    "temporaries": "pink", "other": "gray",
    "attn": "blue", "mlp": "sky", "moe.experts": "green", "moe.shared": "pink",
    "moe.router": "yellow", "moe.dispatch": "indigo", "moe.combine": "olive", "lm_head": "pink",
    "embed": "yellow", "sample": "green", "between parts": "soft", "stage": "pink",
    "tp": "red", "dp": "orange", "ep": "green", "pp": "olive", "cp": "sky", "fsdp": "yellow",
}  # fmt: skip

# Per unit: the factors from the largest, each with the text that follows the number.
_SCALES: Mapping[Unit, Sequence[tuple[float, str]]] = {
    Unit.SECONDS: ((1, " s"), (1e-3, " ms"), (1e-6, " us")),
    Unit.BYTES: ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1, " B")),
    Unit.MEMORY_BYTES: ((2**30, " GiB"),),
    Unit.FLOPS: tuple((10.0**n, f" {p}FLOP/s") for n, p in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (0, ""))),
    Unit.FRACTION: ((0.01, "%"),),
    Unit.NUMBER: ((1, ""),),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart; `description` is its text for screen readers, `name` names its picture file.

    `is_zoomed` allows zooming into the drawing. A chart with the parameters `low` and `high` zooms into
    this range of its x axis instead.
    """

    block: ClassVar[str] = "chart"
    kind: str
    title: str
    description: str
    spec: Mapping[str, Any]
    note: str = ""
    name: str = ""
    is_zoomed: bool = False


def name_of(text: object) -> str:
    """A name from a run, escaped and cut."""
    return short(text, MAX_NAME)


def number_text(value: str, unit: Unit, digits: int = 6) -> str:
    """A Vega expression for the text of the expression `value`, as `format_cell` writes it."""
    *larger, (least, end) = _SCALES[unit]
    text = f"format({value}/{least!r},',.{digits}~r')+'{end}'"
    for factor, suffix in reversed(larger):
        text = f"abs({value})>={0.9995 * factor!r}?format({value}/{factor!r},',.{digits}~r')+'{suffix}':{text}"
    return f"({value}===0?'0':{text})"


def axis(unit: Unit = Unit.NUMBER, title: str | None = None, **more: Any) -> Layer:
    """An axis with ticks in this unit."""
    return {"title": title, "labelExpr": number_text("datum.value", unit), **more}


def log_ticks(values: Iterable[float], *, is_fine: bool = False) -> list[float]:
    """Powers of ten around the values; `is_fine` adds 2 and 5 times them, on a short scale all multiples."""
    known = [value for value in values if value > 0] or [1.0]
    low, high = floor(log10(min(known))), ceil(log10(max(known)))
    steps: tuple[float, ...] = (1, 2, 5) if is_fine else (1,)
    if is_fine and max(known) < 4 * min(known):
        steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    return [float(f"{step * 10.0**n:.6g}") for n in range(low, high + 1) for step in steps]


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """A color for each name, in the order of the names."""
    unique = {name: name.removeprefix("exposed over ") for name in names}
    used = {FIXED.get(axis) for axis in unique.values()}
    cycle = [color for color in CYCLE if color not in used] or CYCLE
    others = dict.fromkeys(axis for axis in unique.values() if axis not in FIXED)
    colors = FIXED | {axis: cycle[i % len(cycle)] for i, axis in enumerate(others)}
    return {name: f"var(--{FIXED.get(name) or colors[axis]})" for name, axis in unique.items()}


def color_by(field: str, names: Iterable[str]) -> Layer:
    """The color of marks by a field, with a legend in the order of the names."""
    colors = colors_of(names)
    widest = 30 + 7 * max(map(len, colors), default=0)
    columns = {"expr": f"max(1,floor(width/{widest}))"}
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(colors), "range": list(colors.values())},
        "legend": {"title": None, "orient": "bottom", "columns": columns, "symbolType": "square"},
    }


def columnar(names: str, rows: Iterable[Sequence[Any]], **constants: Any) -> Layer:
    """Rows as one list per column, which is short in JSON; `flattened` makes rows of them again."""
    columns = list(zip(*rows, strict=True)) or [()] * len(names.split())
    return {**constants, **dict(zip(names.split(), map(list, columns), strict=True))}


def flattened(names: str) -> Layer:
    """The transform that makes rows of the columns."""
    return {"flatten": names.split()}


def choice(name: str, label: str, options: Sequence[str], at: int = 0) -> Layer:
    """A parameter that the reader of the page chooses; one of a single option is not shown."""
    bind = {"input": "select", "options": list(options), "name": f"{label} "}
    return {"name": name, "value": options[at], **({"bind": bind} if len(options) > 1 else {})}


def quantity(field: str, axis: Layer | None = None, **scale: Any) -> Layer:
    """A position by a number."""
    scaled = {"scale": scale} if scale else {}
    return {"field": field, "type": "quantitative", "axis": axis, **scaled}


def marks(
    kind: str,
    encoding: Layer,
    rows: Sequence[Layer] | None = None,
    *transforms: Layer,
    **look: Any,
) -> Layer:
    """A layer of marks, one for each of the `rows`, by default the chart's."""
    data = {} if rows is None else {"data": {"values": rows}}
    transformed = {"transform": list(transforms)} if transforms else {}
    return {**data, **transformed, "mark": {"type": kind, **look}, "encoding": encoding}


def text_mark(
    text: Layer, at: Layer, rows: Sequence[Layer] | None = None, *transforms: Layer, **look: Any
) -> Layer:
    """A layer of text."""
    look = {"fill": INK, "baseline": "middle", "limit": 0, **look}
    return marks("text", {"text": text, **at}, rows, *transforms, **look)


def layered(
    *layers: Layer, height: Any, width: int = WIDTH, is_fixed: bool = False, **top: Any
) -> Layer:
    """A specification of layers in the style of all charts."""
    return {
        "width": width,
        "height": height,
        "autosize": {"type": "pad" if is_fixed else "fit-x", "contains": "padding"},
        "layer": list(layers),
        "usermeta": {"is_fixed": is_fixed},
        **top,
    }


CONFIG: Layer = {
    "aria": False,
    "background": None,
    "padding": 2,
    "font": "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif",
    "view": {"stroke": None},
    "text": {"fontSize": 12, "fill": INK},
    "axis": {
        "labelColor": SOFT, "titleColor": SOFT, "labelFontSize": 11.5, "titleFontSize": 11.5,
        "titleFontWeight": "normal", "gridColor": "var(--faint)", "tickColor": "var(--line)",
        "domainColor": "var(--line)", "labelLimit": 150, "labelFlush": True, "labelOverlap": True,
        "tickCount": 6,
    },
    "legend": {
        "labelColor": INK, "titleColor": SOFT, "labelFontSize": 12, "titleFontSize": 11.5,
        "titleFontWeight": "normal", "labelLimit": 260, "offset": 8, "symbolStrokeWidth": 1.5,
        "layout": {"bottom": {"direction": "vertical", "anchor": "start"}},
    },
    "title": {"color": INK, "fontSize": 13, "anchor": "start", "offset": 10},
}  # fmt: skip


class Bar(NamedTuple):
    """A named bar of segments that start at 0, with the text at its end and an interval."""

    name: str
    segments: Sequence[tuple[str, float]]
    end_text: str
    low: float | None = None
    high: float | None = None


_PITCH, _BAR = 46, 20  # pixels of a row and of its bar
_ROW: Layer = {"field": "row", "type": "ordinal", "axis": None, "scale": {"padding": 0}}


def row_texts(
    rows: Sequence[Layer] | None, value: Layer, *, y: Layer = _ROW, dy: float = -12
) -> Iterable[Layer]:
    """The name of each row at the left above its bar, and the text of its value at the right."""
    yield text_mark({"field": "name"}, {"y": y, "x": {"value": 0}}, rows, align="left", dy=dy)
    at_end = {"y": y, "x": {"value": {"expr": "width"}}}
    yield text_mark(value, at_end, rows, align="right", dy=dy)


def bars_chart(  # noqa: PLR0913  a chart and its bars
    name: str,
    title: str,
    bars: Sequence[Bar],
    unit: Unit,
    *,
    limit: float | None = None,
    note: str = "",
) -> Chart:
    """Horizontal bars one below the other; `limit` is a dashed line through all."""
    rows = [row._replace(name=name_of(row.name)) for row in bars]
    text_of = format_seconds if unit is Unit.SECONDS else format_bytes
    most = max((max(sum(v for _, v in row.segments), row.high or 0) for row in rows), default=0)
    most = max(most, limit or 0) or 1
    segments: list[Layer] = []
    for number, row in enumerate(rows):
        at, total = 0.0, sum(value for _, value in row.segments)
        for part, value in row.segments:
            digits = 1 if value < 0.1 * total else 0
            share = f" ({100 * value / total:.{digits}f}%)" if total else ""
            label, end = name_of(part), at + value
            tip = f"{row.name}\n{label}: {text_of(value)}{share}"
            segments.append({"row": number, "label": label, "a": at, "b": end, "tip": tip})
            at = end
    # The legend leaves out what is narrower than a line.
    seen = [one["label"] for one in segments if one["b"] - one["a"] >= 0.003 * most]
    color = color_by("label", seen or [one["label"] for one in segments])
    heads = [{"row": i, "name": row.name, "end": row.end_text} for i, row in enumerate(rows)]
    whiskers = [
        {"row": i, "a": row.low, "b": row.high, "tip": f"{row.name}\ninterval: {text_of(row.low)} to {text_of(row.high)}"}
        for i, row in enumerate(rows)
        if row.low is not None and row.high is not None
    ]  # fmt: skip
    ticks: Layer = {}
    if unit is Unit.MEMORY_BYTES:  # whole GiB
        step = 2.0 ** max(30, 30 + ceil(log2(most / 2**33)))
        ticks = {"values": [i * step for i in range(int(most / step) + 1)]}
    x = quantity("a", axis(unit, orient="bottom", **ticks), domain=[0, most], nice=False)
    at_row: Layer = {"y": _ROW, "x": x, "x2": {"field": "b"}, "tooltip": TIP}
    layers = [marks("bar", {**at_row, "color": color}, segments, height=_BAR, yOffset=9)]
    if whiskers:
        look = {"strokeWidth": 1.6, "yOffset": 9}
        layers.append(marks("rule", at_row, whiskers, stroke=INK, **look))
        look = {"color": INK, "size": 9, "thickness": 1.6, "yOffset": 9}
        ends = ({"y": _ROW, "x": {**x, "field": field}} for field in "ab")
        layers += [marks("tick", end, whiskers, **look) for end in ends]
    if limit is not None:
        at_limit: Layer = {"x": {"datum": limit, "type": "quantitative"}}
        layers.append(marks("rule", at_limit, [{}], stroke=INK, strokeDash=[5, 4]))
    return Chart(
        kind="bars",
        name=name,
        title=title,
        description="; ".join(f"{row.name} {row.end_text}" for row in rows),
        spec=layered(*layers, *row_texts(heads, {"field": "end"}), height={"step": _PITCH}),
        note=note,
    )
