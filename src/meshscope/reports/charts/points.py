"""Points in a plane: the roofline of a device, and the Pareto front of a search."""

import json
from collections.abc import Sequence

from meshscope.analysis.roofline import Roofline
from meshscope.events.enums import Phase, Source
from meshscope.reports.charts.spec import Chart, Layer, chart, choice, color_by, log_ticks, name_of
from meshscope.reports.charts.traffic import MAX_DESCRIBED
from meshscope.reports.model import Unit, format_cell
from meshscope.reports.plan import choice_name
from meshscope.serving.search import Choice, PlanSearch
from meshscope.units import format_bytes, format_seconds

OTHER_PLANS = "best of another plan"
TTFT, TPOT, RATE = "TTFT", "TPOT", "request tokens/s per chip"
MAX_PLANS = 8  # with a color of their own
FRONT = "No choice is better than one of the front in TTFT, TPOT and request tokens/s per chip at once. Hollow: the best choice of other plans. Dashed: the limits."
CLOSEST_NOTE = "The choice that comes closest to the limits, and those with the least TTFT and the least TPOT. Dashed: the limits."


def roofline_chart(roofline: Roofline) -> Chart:
    """FLOP/s of each part of the model over its arithmetic intensity, below the peaks of the chip."""
    peak, hbm = roofline.peaks.flops_per_s, roofline.peaks.hbm_bytes_per_s
    ridge, points = peak / hbm, roofline.points
    low = min(ridge, *(p.flops_per_byte for p in points)) / 2
    high = max(ridge, *(p.flops_per_byte for p in points)) * 3
    rates = [peak, *(p.flops_per_s for p in points)]
    phases = [phase.value for phase in Phase if any(p.phase is phase for p in points)]
    tip = f"roofline: HBM {format_bytes(hbm)}/s, bf16 peak {_flops(peak)}\nridge point: {ridge:.3g} FLOPs/byte"
    described = (
        f"{p.part} in {p.phase} at {p.flops_per_s / peak:.0%} of peak FLOP/s"
        for p in points[:MAX_DESCRIBED]
    )
    return chart(
        "roofline",
        "; ".join(described),
        name="roofline",
        x_ends=[low, high],
        x_ticks=log_ticks((low, high)),
        y_ends=[min(rates) / 2, peak * 2],
        y_ticks=log_ticks(rates),
        roof=[{"x": x, "y": min(peak, x * hbm), "tip": tip} for x in (low, ridge, high)],
        color=color_by("part", [name_of(p.part) for p in points]),
        phases=phases,
        shapes=["circle", "triangle-up", "square"][: len(phases)],
        points=[
            {
                "x": p.flops_per_byte, "y": p.flops_per_s, "part": name_of(p.part), "phase": p.phase,
                "hollow": p.source is Source.PREDICTED,
                "tip": f"{p.part}, {p.phase} ({p.source})\n{_flops(p.flops_per_s)}, {p.flops_per_s / min(peak, p.flops_per_byte * hbm):.0%} of the roofline "
                f"at {p.flops_per_byte:.3g} FLOPs/byte\n{format_seconds(p.compute_s)} of compute per step",
            }
            for p in points
        ],
    )  # fmt: skip


def _flops(rate: float) -> str:
    return f"{format_cell(rate, Unit.FLOPS)}/s"


def front_chart(
    search: PlanSearch, shown: Sequence[Choice], others: Sequence[Choice] = ()
) -> Chart:
    """Choices by two of TTFT, TPOT and request tokens/s per chip, the best first; the limits are dashed."""
    names = ("winner", "Pareto front") if search.front else ("closest", "least latency")
    groups = [(names[0], shown[:1]), (names[1], shown[1:]), (OTHER_PLANS, others)]
    plans = list(dict.fromkeys(name_of(c.experiment.plan) for c in (*shown, *others)))[:MAX_PLANS]
    points: list[Layer] = []
    for group, choices in groups:
        for one in choices:
            plan, rate = name_of(one.experiment.plan), one.tokens_per_s_per_chip
            figures = {TTFT: one.ttft_s, TPOT: one.tpot_s, RATE: rate}
            texts = {TTFT: format_seconds(one.ttft_s), TPOT: format_seconds(one.tpot_s)}
            said = (f"{name} {text}" for name, text in {**texts, RATE: f"{rate:,.3g}"}.items())
            tip = f"{name_of(choice_name(one))} ({group})\n{', '.join(said)}"
            named = plan if plan in plans else "other plans"
            points.append({"plan": named, "group": group, **figures, "tip": tip})
    objective = search.objective
    limits: list[Layer] = [
        {"measure": name, "v": v, "tip": f"limit of {name}: {format_seconds(v)}"}
        for name, v in ((TTFT, objective.ttft_s), (TPOT, objective.tpot_s))
        if v is not None
    ]
    every = [*points, *({n["measure"]: n["v"]} for n in limits)]
    measures = [TTFT, TPOT, RATE]
    ticks = {n: log_ticks((v[n] for v in every if n in v), is_fine=True) for n in measures}
    shapes = {names[0]: "diamond", names[1]: "circle"} | ({OTHER_PLANS: "square"} if others else {})
    described = (
        f"{choice_name(one)}: TTFT {format_seconds(one.ttft_s)}, TPOT {format_seconds(one.tpot_s)}, {one.tokens_per_s_per_chip:,.0f} {RATE}"
        for one in shown[:3]
    )
    return chart(
        "front",
        "; ".join(described),
        name="front",
        note=FRONT if search.front else CLOSEST_NOTE,
        params=[choice("across", "across", measures), choice("up", "up", measures, at=2)],
        ticks=json.dumps(ticks),
        limits=limits,
        color=color_by("plan", [point["plan"] for point in points]),
        best=names[0],
        groups=list(shapes),
        shapes=list(shapes.values()),
        points=points[::-1],  # the best is drawn last, above the others
    )
