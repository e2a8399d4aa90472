"""The three roofs of every step and part, as text and for --json."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.analysis.roofline_bound import BindingResource, RooflineBounds, roofs_of
from meshscope.events.enums import Source
from meshscope.spec.hardware.chips import Chip
from meshscope.store.run import RunRecord
from meshscope.units import format_seconds
from meshscope.views.plain import plain
from meshscope.views.tables import new_table

MAX_FACTOR = 100
WORDS = {
    BindingResource.COMPUTE: "compute",
    BindingResource.HBM: "HBM",
    BindingResource.INTERCONNECT: "wires",
}


def roofline_document(run: RunRecord, source: Source, chip: Chip | None) -> dict[str, Any]:
    """The roofs of each phase of one source; nothing where no step is modelled."""
    times = run.times_of(source)
    if chip is None or not times:
        return {}
    found = {time.phase.value: [asdict(one) for one in roofs_of(time, chip)] for time in times}
    return {"roofline": found}


def roofline_lines(run: RunRecord, chip: Chip | None) -> Iterator[RenderableType]:
    """A table for each step, predicted and compiled."""
    found = [] if chip is None else [(time, roofs_of(time, chip)) for time in run.times]
    if chip is None or not any(roofs for _, roofs in found):
        yield Text("no roofline: no step of this run is modelled", style="yellow")
        return
    for time, roofs in found:
        table = new_table(
            f"{time.phase}, {time.source}",
            "compute\nroof",
            "HBM\nroof",
            "wires",
            "modelled",
            "at the\nroof",
            "binds",
            "times the\nnext",
        )
        for one in roofs:
            table.add_row(*_cells(one))
        yield table
        yield Text("")
    yield Text(
        f"roofs of one {chip.name}: {chip.source}; wires by the interconnect model", style="dim"
    )


def _cells(roofs: RooflineBounds) -> list[str]:
    factor = roofs.factor
    by = "" if factor is None else f"{factor:.1f}" if factor < MAX_FACTOR else f">{MAX_FACTOR}"
    seconds = (roofs.compute_s, roofs.hbm_s, roofs.interconnect_s, roofs.taken_s)
    frac = "?" if roofs.roof_frac is None else f"{roofs.roof_frac:.0%}"
    return [plain(roofs.part), *map(format_seconds, seconds), frac, WORDS[roofs.binding], by]
