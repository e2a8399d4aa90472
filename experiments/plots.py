"""Draws docs/evidence/moe/*.png from the CSV files beside them: `python experiments/plots.py`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from results import CASES, read_table

DOCS = Path(__file__).parents[1] / "docs"
BYTES_OF_ELEMENT = 2  # bf16
CHIPS = (8, 16, 32, 64)

# The Okabe-Ito palette, distinguishable with any color vision; markers differ, too.
STYLES = {
    "auto gathered": ("#D55E00", "X"),
    "auto one_hot 2": ("#E69F00", "s"),
    "auto one_hot_pinned 2": ("#CC79A7", "D"),
    "ragged 2": ("#56B4E9", "o"),
    "capacity 2": ("#0072B2", "^"),
}

Row = Mapping[str, Any]


def write(folder: Path) -> None:
    """Draws every figure."""
    rows = [row for row in read_table(DOCS / "evidence" / "moe" / CASES) if row["study"] == "moe"]
    rows = [row for row in rows if not row["refused"]]
    draw_panels(rows, "temp_bytes", "temporary memory of one device, bytes", folder / "memory.png")
    draw_panels(
        rows, "moe_wire_bytes", "sent by one device for the experts, bytes", folder / "wire.png"
    )
    draw_rings(read_table(DOCS / "evidence" / "moe" / "rings.csv"), folder / "rings.png")


def draw_panels(rows: Sequence[Row], column: str, label: str, path: Path) -> None:
    """One panel per model: a column against the number of chips, both logarithmic."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(1, len(models), figsize=(11, 4.8), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        of_model = [row for row in rows if row["model"] == model]
        for way, (colour, marker) in STYLES.items():
            points = sorted(
                (int(row["n_devices"]), float(row[column])) for row in of_model if row["way"] == way
            )
            if points:
                panel.plot(*zip(*points, strict=True), color=colour, marker=marker, label=way)
        _draw_bounds(panel, of_model, column)
        _label(panel, model, label)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bounds(panel: Any, rows: Sequence[Row], column: str) -> None:
    """Lower bounds of broadcast and exchange, dashed."""
    sizes = CHIPS
    local = int(rows[0]["tokens_a_device"]) * int(rows[0]["hidden"]) * BYTES_OF_ELEMENT
    n_active = int(rows[0]["n_active"])
    if column == "temp_bytes":
        bounds = {
            "every token on every device, S·D": [n * local for n in sizes],
            "the tokens of a device, S·D/N": [local for _ in sizes],
        }
    else:
        bounds = {
            "gather all tokens, scatter all sums": [2 * (n - 1) * local for n in sizes],
            "each token to its K experts and back": [
                2 * n_active * local * (n - 1) / n for n in sizes
            ],
        }
    for (text, values), dashes in zip(bounds.items(), ("--", ":"), strict=True):
        panel.plot(sizes, values, dashes, color="#777777", linewidth=1.2, label=text)


def _label(panel: Any, title: str, label: str) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlim(7, 73)
    panel.set_xticks(CHIPS, list(map(str, CHIPS)))
    panel.set_xlabel("chips N (1,024 tokens each)")
    panel.set_ylabel(label)
    panel.yaxis.set_major_formatter(_bytes)
    panel.set_title(title)
    panel.grid(visible=True, which="major", color="#dddddd")


def _bytes(value: float, _: Any) -> str:
    """A tick label such as 10 MB or 1 GB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


def draw_rings(rows: Iterable[Row], path: Path) -> None:
    """One bar of estimated cycles per variant: covered by a collective, and uncovered."""
    rows = list(rows)
    figure, panel = plt.subplots(figsize=(8.5, 3.2))
    covered = [int(row["covered_cycles"]) / 1e6 for row in rows]
    open_ = [int(row["estimated_cycles"]) / 1e6 - c for row, c in zip(rows, covered, strict=True)]
    names = [row["way"] for row in rows]
    panel.barh(names, covered, color="#0072B2", label="with a transfer under way")
    panel.barh(names, open_, left=covered, color="#E69F00", hatch="//", label="with none under way")
    panel.invert_yaxis()
    panel.set_xlabel(
        "the compiler's estimated cycles of compute, millions (transfers not included)"
    )
    panel.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.4, 1.2), ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    write(DOCS / "evidence" / "moe")
