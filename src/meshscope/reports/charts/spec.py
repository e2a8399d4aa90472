"""Charts as Vega-Lite specifications, drawn alike by the report, the notebook and `export --to plots`.

`specs.yaml` has the specification of each kind of chart; here it gets its values. A color is a variable of the page's
style, such as `var(--blue)`, which `pictures.py` replaces. The page replaces widths with the window's unless `is_fixed`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, floor, log10
from string import Template
from typing import Any, ClassVar, NamedTuple

import yaml

from meshscope.files import own_text
from meshscope.reports.model import Unit, short
from meshscope.units import format_bytes, format_seconds

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
WIDTH = 640  # pixels of a picture
MAX_NAME = 80  # characters of a name in a chart

Layer = dict[str, Any]

# Per unit: the factors from the largest, each with the text that follows the number.
_SCALES: Mapping[Unit, Sequence[tuple[float, str]]] = {
    Unit.SECONDS: ((1, " s"), (1e-3, " ms"), (1e-6, " us")),
    Unit.BYTES: ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1, " B")),
    Unit.FLOPS: tuple((10.0**n, f" {p}FLOP/s") for n, p in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (0, ""))),
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


@cache
def look() -> Mapping[str, Any]:
    """The colors, the style and the specifications of `specs.yaml`."""
    return read_yaml("charts/specs.yaml")


@cache
def read_yaml(name: str) -> Any:
    """A data file of this package, by its path."""
    text = own_text(f"reports/{name}")
    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may be built without libyaml
    return yaml.load(text, fast)  # noqa: S506  both are safe


def chart(kind: str, description: str, *, title: str = "", name: str = "", **values: Any) -> Chart:
    """The chart of this kind with the values that its specification names."""
    for unit in _SCALES:
        values[unit.value] = number_text("datum.value", unit)
        values[f"{unit.value}3"] = number_text("datum.value", unit, digits=3)
    if "color" in values:
        values["plain_color"] = {**values["color"], "legend": None}
    parts: Layer = filled(look()["charts"][kind], values)
    head = {n: parts.pop(n) for n in ("title", "note", "is_zoomed") if n in parts}
    head |= {"title": title} if title else {}
    is_fixed = parts.pop("is_fixed", False)
    if "axes_title" in parts:
        parts["title"] = parts.pop("axes_title")
    spec = {
        "width": WIDTH,
        "autosize": {"type": "pad" if is_fixed else "fit-x", "contains": "padding"},
        "usermeta": {"is_fixed": is_fixed},
        **parts,
    }
    return Chart(kind=kind, name=name, description=description, spec=spec, **head)


def filled(part: Any, values: Mapping[str, Any]) -> Any:
    """A document with its values: for a text `$name`, or for `$name` inside a text."""
    if isinstance(part, dict):
        return {name: filled(value, values) for name, value in part.items() if name != "if"}
    if isinstance(part, list):
        shown = (
            one for one in part if not isinstance(one, dict) or filled(one.get("if", 1), values)
        )
        return [filled(one, values) for one in shown]
    if not isinstance(part, str) or "$" not in part:
        return part
    return values[part[1:]] if part[1:] in values else Template(part).substitute(values)


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
    fixed: dict[str, str] = look()["fixed"]
    unique = {name: name.removeprefix("exposed over ") for name in names}
    used = {fixed.get(axis) for axis in unique.values()}
    cycle = [color for color in look()["cycle"] if color not in used] or look()["cycle"]
    others = dict.fromkeys(axis for axis in unique.values() if axis not in fixed)
    colors = fixed | {axis: cycle[i % len(cycle)] for i, axis in enumerate(others)}
    return {name: f"var(--{fixed.get(name) or colors[axis]})" for name, axis in unique.items()}


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
    """Rows as one list per column, which is short in JSON; the specification makes rows of them again."""
    columns = list(zip(*rows, strict=True)) or [()] * len(names.split())
    return {**constants, **dict(zip(names.split(), map(list, columns), strict=True))}


def choice(name: str, label: str, options: Sequence[str], at: int = 0) -> Layer:
    """A parameter that the reader of the page chooses; one of a single option is not shown."""
    bind = {"input": "select", "options": list(options), "name": f"{label} "}
    return {"name": name, "value": options[at], **({"bind": bind} if len(options) > 1 else {})}


class Bar(NamedTuple):
    """A named bar of segments that start at 0, with the text at its end and an interval."""

    name: str
    segments: Sequence[tuple[str, float]]
    end_text: str
    low: float | None = None
    high: float | None = None


def bars_chart(name: str, title: str, bars: Sequence[Bar], unit: Unit, *, note: str = "") -> Chart:
    """Horizontal bars one below the other."""
    rows = [row._replace(name=name_of(row.name)) for row in bars]
    text_of = format_seconds if unit is Unit.SECONDS else format_bytes
    most = max((max(sum(v for _, v in row.segments), row.high or 0) for row in rows), default=0)
    most = most or 1
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
    return chart(
        "bars",
        "; ".join(f"{row.name} {row.end_text}" for row in rows),
        name=name,
        title=title,
        note=note,
        axis={
            "title": None, "labelExpr": number_text("datum.value", unit), "orient": "bottom"
        },
        most=most,
        color=color_by("label", seen or [one["label"] for one in segments]),
        segments=segments,
        heads=[{"row": i, "name": row.name, "end": row.end_text} for i, row in enumerate(rows)],
        whiskers=[
            {"row": i, "a": row.low, "b": row.high, "tip": f"{row.name}\ninterval: {text_of(row.low)} to {text_of(row.high)}"}
            for i, row in enumerate(rows)
            if row.low is not None and row.high is not None
        ],
    )  # fmt: skip
