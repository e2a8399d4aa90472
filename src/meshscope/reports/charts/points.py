"""Points in a plane: the roofline of a device, and the Pareto front of a search."""

import json
from collections.abc import Mapping, Sequence

from meshscope.analysis.roofline import Roofline
from meshscope.events.enums import Phase, Source
from meshscope.reports.charts.spec import (
    INK,
    SOFT,
    TIP,
    Chart,
    Layer,
    axis,
    choice,
    color_by,
    layered,
    log_ticks,
    marks,
    name_of,
    number_text,
    quantity,
)
from meshscope.reports.charts.traffic import MAX_DESCRIBED
from meshscope.reports.model import Unit, format_cell
from meshscope.reports.plan import choice_name
from meshscope.serving.search import Choice, PlanSearch
from meshscope.units import format_bytes, format_seconds

ROOFLINE_NOTE = "Hollow marks are predicted. FLOPs and bytes come from the shapes of the operations and are divided by compute time alone. Bytes prefetched ahead of a part, such as weights in decode, are not counted and shift its point to the right. Bytes that stay in VMEM are counted and can lift a point above the roofline."
WINNER, ON_FRONT, OTHER_PLANS = "winner", "Pareto front", "best of another plan"
CLOSEST, FASTEST = "closest", "least latency"
TTFT, TPOT, RATE = "TTFT", "TPOT", "request tokens/s per chip"
MAX_PLANS = 8  # with a color of their own
FRONT = "No choice is better than one of the front in TTFT, TPOT and request tokens/s per chip at once. Hollow: the best choice of other plans. Dashed: the limits."
CLOSEST_NOTE = "The choice that comes closest to the limits, and those with the least TTFT and the least TPOT. Dashed: the limits."


def _points(
    at: Layer, color: Layer, is_hollow: str, shape: Layer, rows: list[Layer], *transforms: Layer
) -> Layer:
    """Points in the color of a field, hollow where the expression is true."""
    look: Layer = {
        "stroke": {**color, "legend": None},
        "fill": color,
        "fillOpacity": {"condition": {"test": is_hollow, "value": 0}, "value": 1},
        "shape": shape,
        "tooltip": TIP,
    }
    return marks("point", {**at, **look}, rows, *transforms, size=90, strokeWidth=2, opacity=1)


def _shapes(field: str, shapes: Mapping[str, str]) -> Layer:
    legend = {"title": None, "orient": "bottom", "symbolFillColor": SOFT}
    scale = {"domain": list(shapes), "range": list(shapes.values())}
    return {"field": field, "type": "nominal", "legend": legend, "scale": scale}


def roofline_chart(roofline: Roofline) -> Chart:
    """FLOP/s of each part of the model over its arithmetic intensity, below the peaks of the chip."""
    peak, hbm = roofline.peaks.flops_per_s, roofline.peaks.hbm_bytes_per_s
    ridge = peak / hbm
    xs = [ridge, *(point.flops_per_byte for point in roofline.points)]
    ys = [peak, *(point.flops_per_s for point in roofline.points)]
    low, high = min(xs) / 2, max(xs) * 3
    values: list[Layer] = [
        {
            "x": p.flops_per_byte, "y": p.flops_per_s, "part": name_of(p.part), "phase": p.phase,
            "hollow": p.source is Source.PREDICTED,
            "tip": f"{p.part}, {p.phase} ({p.source})\n{_flops(p.flops_per_s)}, {p.flops_per_s / min(peak, p.flops_per_byte * hbm):.0%} of the roofline "
            f"at {p.flops_per_byte:.3g} FLOPs/byte\n{format_seconds(p.compute_s)} of compute per step",
        }
        for p in roofline.points
    ]  # fmt: skip
    described = (
        f"{p.part} in {p.phase} at {p.flops_per_s / peak:.0%} of peak FLOP/s"
        for p in roofline.points[:MAX_DESCRIBED]
    )
    intensity = axis(Unit.NUMBER, "arithmetic intensity (FLOPs per byte of HBM traffic)", values=log_ticks((low, high)))  # fmt: skip
    rate = axis(Unit.FLOPS, values=log_ticks(ys))
    at: Layer = {
        "x": quantity("x", intensity, type="log", domain=[low, high], nice=False),
        "y": quantity("y", rate, type="log", domain=[min(ys) / 2, peak * 2], nice=False),
    }
    tip = f"roofline: HBM {format_bytes(hbm)}/s, bf16 peak {_flops(peak)}\nridge point: {ridge:.3g} FLOPs/byte"
    corners: list[Layer] = [
        {"x": x, "y": min(peak, x * hbm), "tip": tip} for x in (low, ridge, high)
    ]
    roof = marks("line", {**at, "tooltip": TIP}, corners, stroke=INK, strokeWidth=2, clip=True)
    phases = [phase.value for phase in Phase if any(p.phase is phase for p in roofline.points)]
    shapes = _shapes("phase", dict(zip(phases, ("circle", "triangle-up", "square"), strict=False)))
    color = color_by("part", [value["part"] for value in values])
    return Chart(
        kind="roofline",
        name="roofline",
        title="Roofline of one device",
        description="; ".join(described),
        spec=layered(roof, _points(at, color, "datum.hollow", shapes, values), height=280),
        note=ROOFLINE_NOTE,
        is_zoomed=True,
    )


def _flops(rate: float) -> str:
    return f"{format_cell(rate, Unit.FLOPS)}/s"


def front_chart(
    search: PlanSearch, shown: Sequence[Choice], others: Sequence[Choice] = ()
) -> Chart:
    """Choices by two of TTFT, TPOT and request tokens/s per chip, the best first; the limits are dashed."""
    units = {TTFT: Unit.SECONDS, TPOT: Unit.SECONDS, RATE: Unit.NUMBER}
    names = (WINNER, ON_FRONT) if search.front else (CLOSEST, FASTEST)
    groups = [(names[0], shown[:1]), (names[1], shown[1:]), (OTHER_PLANS, others)]
    plans = list(dict.fromkeys(name_of(c.experiment.plan) for c in (*shown, *others)))
    values: list[Layer] = [
        {
            "plan": plan if plan in plans[:MAX_PLANS] else "other plans", "group": group, **figures,
            "tip": f"{name_of(choice_name(one))} ({group})\n"
            + ", ".join(f"{name} {_figure(value, units[name])}" for name, value in figures.items()),
        }
        for group, choices in groups
        for one in choices
        for plan in [name_of(one.experiment.plan)]
        for figures in [{TTFT: one.ttft_s, TPOT: one.tpot_s, RATE: one.tokens_per_s_per_chip}]
    ]  # fmt: skip
    objective = search.objective
    limits: list[Layer] = [
        {"measure": name, "v": v, "tip": f"limit of {name}: {format_seconds(v)}"}
        for name, v in ((TTFT, objective.ttft_s), (TPOT, objective.tpot_s))
        if v is not None
    ]

    every = [*values, *({n["measure"]: n["v"]} for n in limits)]
    ticks = {name: log_ticks((v[name] for v in every if name in v), is_fine=True) for name in units}

    def place(field: str, chosen: str) -> Layer:
        number, seconds = (
            number_text("datum.value", u, digits=3) for u in (Unit.NUMBER, Unit.SECONDS)
        )
        ends: Layer = {
            "title": None, "labelExpr": f"{chosen}==='{RATE}' ? {number} : {seconds}",
            "values": {"expr": f"{json.dumps(ticks)}[{chosen}]"},
        }  # fmt: skip
        return quantity(field, ends, type="log", nice=False, zero=False, padding=16)

    at: dict[str, Layer] = {"x": place("x", "across"), "y": place("y", "up")}
    chosen = {"x": "across", "y": "up"}
    shapes = {
        names[0]: "diamond",
        names[1]: "circle",
        **({OTHER_PLANS: "square"} if others else {}),
    }
    points = _points(
        at,
        color_by("plan", [value["plan"] for value in values]),
        f"datum.group==='{OTHER_PLANS}'",
        _shapes("group", shapes),
        values[::-1],  # the best is drawn last, above the others
        *({"calculate": f"datum[{name}]", "as": field} for field, name in chosen.items()),
    )
    is_best = {"test": f"datum.group==='{names[0]}'", "value": 200}
    points["encoding"]["size"] = {"condition": is_best, "value": 80}
    dashed = {"stroke": SOFT, "strokeDash": [4, 4], "strokeWidth": 1.5}
    lines: list[Layer] = [
        marks(
            "rule",
            {field: {**at[field], "field": "v"}, "tooltip": TIP},
            limits,
            {"filter": f"datum.measure==={name}"},
            **dashed,
        )
        for field, name in chosen.items()
        if limits
    ]
    figures = (
        f"{choice_name(one)}: TTFT {format_seconds(one.ttft_s)}, TPOT {format_seconds(one.tpot_s)}, {one.tokens_per_s_per_chip:,.0f} {RATE}"
        for one in shown[:3]
    )
    return Chart(
        kind="front",
        name="front",
        title=f"{TTFT}, {TPOT} and {RATE}",
        description="; ".join(figures),
        spec=layered(
            *lines,
            points,
            height=300,
            title={"text": {"expr": "up+' over '+across"}, "fontSize": 12, "fontWeight": "normal", "color": SOFT},
            params=[
                choice("across", "across", list(units)),
                choice("up", "up", list(units), at=2),
            ],
        ),
        note=FRONT if search.front else CLOSEST_NOTE,
        is_zoomed=True,
    )  # fmt: skip


def _figure(value: float, unit: Unit) -> str:
    return format_seconds(value) if unit is Unit.SECONDS else f"{value:,.3g}"
