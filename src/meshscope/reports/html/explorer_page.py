"""The page of `explore`: controls, and figures that it computes itself from the document of `serving.explorer`."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from meshscope.events.step_time import Activity
from meshscope.hardware.interconnect.fabric import fabric_of
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.reports.charts import spec
from meshscope.reports.charts.traffic import MAX_CHIPS, TorusPlanes, wraps_note
from meshscope.reports.html.blocks import page_table
from meshscope.reports.html.page import blocks_html
from meshscope.reports.model import short, table
from meshscope.units import counted

TILES = {
    "ttft": "TTFT, prefill",
    "tpot": "TPOT, decode",
    "e2e": "request, end to end",
    "rate": "decode tokens/s",
    "cost": "per million output tokens",
}
COLUMNS = (
    *("show", "slice", "plan", "batch#", "TTFT_s", "TPOT_s", "decode tokens/s per chip#"),
    "million output tokens#",
)
WIDTH = 270  # pixels of a torus, which fills half of a window
CHIP_COLORS = ("blue", "orange", "green", "pink", "indigo", "red", "sky")
COLORS = {
    Activity.MATMUL: "blue", Activity.KERNEL: "indigo", Activity.COPY: "sky", Activity.ELEMENTWISE: "green",
    Activity.BY_EXPERT: "olive", Activity.GATHER: "olive", Activity.SMALL: "yellow", Activity.BUBBLE: "pink",
}  # fmt: skip


def explorer_html(document: Mapping[str, Any], prices: Mapping[str, float], note: str = "") -> str:
    """The page as one HTML file; `prices` are per chip hour, and `note` says where they come from."""
    slices: list[dict[str, Any]] = [
        {**one, "torus": torus_drawing(parse_topology(one["topology"]))}
        for one in document["slices"]
    ]
    written = {
        **document,
        "slices": slices,
        "prices": prices,
        "colors": {activity.name.lower(): color for activity, color in COLORS.items()},
    }
    text = json.dumps(written, allow_nan=False, separators=(",", ":"))
    packed = gzip.compress(text.encode("utf-8"), mtime=0)
    chips = list(dict.fromkeys(one["chip"] for one in slices))
    names = ", ".join(one["name"] for one in slices)
    n_plans, n_legal = (
        sum(len(one["plans"]) for one in slices),
        sum(one["n_legal"] for one in slices),
    )
    block = {
        "block": "explorer",
        "tiles": list(TILES.items()),
        "note": f"{note[:1].upper()}{note[1:]}." if note else "",
        "chart": spec.chart(
            "explorer",
            "Cost of output tokens against latency for every plan that fits",
            name="explorer",
            params=[
                spec.choice("across", "across", ["TPOT", "TTFT", "request time"]),
                {"name": "cost", "value": ""},
            ],
            none=[],
            color=chip_colors(chips),
        ),
        "table": page_table("frontier", table(COLUMNS, (), title="Frontier of cost and latency")),
        "plans": base64.b64encode(packed).decode("ascii"),
    }
    block["about"] = (
        f"{counted(n_plans, 'plan')} of {n_legal:,} legal ones on {names}: those on the Pareto front of TTFT, TPOT and "
        "tokens/s per chip for short, middle or long requests. All figures are predicted, as by meshscope predict: "
        "device time, without host, queueing and tokenization."
    )
    lead = "Change anything: times, memory, cost and link loads follow. Predicted, with intervals."
    title = f"Plans of {short(document['model'])}"
    return blocks_html(title, [block], lead=lead)


def chip_colors(chips: Sequence[str]) -> spec.Layer:
    """The color of marks by their chip."""
    color = spec.color_by("chip", chips)
    colors = [f"var(--{CHIP_COLORS[n % len(CHIP_COLORS)]})" for n in range(len(chips))]
    scale = {"domain": list(chips), "range": colors}
    return {**color, "legend": {**color["legend"], "symbolOpacity": 1}, "scale": scale}


def torus_drawing(topology: Topology) -> dict[str, Any] | None:
    """The places of chips, and of the lines of every link by its position in [chip, dim, direction]; None without a torus."""
    fabric = fabric_of(topology)
    if not fabric.is_torus or not 1 < topology.n_chips <= MAX_CHIPS:
        return None
    planes = TorusPlanes(fabric.sizes, topology.n_slices, width=WIDTH)
    x, y, z = fabric.sizes
    links, n_stubs = list[Sequence[float]](), 0
    places = list(product(range(topology.n_slices), range(z), range(y), range(x)))
    for chip, (at, at_z, at_y, at_x) in enumerate(places):
        for dim, direction in product(range(3), range(2)):
            source = (at_x, at_y, at_z)
            neighbor = source[dim] + (1, -1)[direction]
            is_wrap = not 0 <= neighbor < fabric.sizes[dim]
            if fabric.sizes[dim] == 1 or (is_wrap and not fabric.wraps[dim]):
                continue
            target = [*source]
            target[dim] = neighbor % fabric.sizes[dim]
            lines = list(
                planes.lines(at, source, (target[0], target[1], target[2]), is_wrap=is_wrap)
            )
            number = (chip * 3 + dim) * 2 + direction
            links += [[number, *(round(v, 1) for v in (*start, *end))] for start, end in lines]
            n_stubs += len(lines) - 1
    devices: dict[int, list[str]] = {}
    for device, chip in enumerate(fabric.chip.tolist()):
        devices.setdefault(chip, []).append(str(device))
    named = [",".join(devices[chip]) for chip in range(len(places))]
    side, font = planes.sizes_of(named)
    return {
        "size": [round(planes.size[0]), round(planes.size[1])],
        "side": round(side, 1),
        "font": round(font, 1),
        "width": round(2 + min(4.0, 0.05 * planes.pitch), 1),
        "chips": [
            [*planes.at(at, (at_x, at_y, at_z)), name]
            for (at, at_z, at_y, at_x), name in zip(places, named, strict=True)
        ],
        "links": links,
        "n_stubs": n_stubs,
        "heads": [[px - 0.3 * planes.pitch, py, text] for px, py, text in planes.heads()],
        "note": wraps_note(fabric),
    }
