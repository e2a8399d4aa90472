"""Published times of layers, products and copies beside predicted ones, for docs/evidence/accuracy.md.

`tools/fit_experts.py` fits four constants of each kind of layer to half of its rows in tools/published_parts.csv; no
other constant saw a row. The size of a layer is its tokens in all devices, and the size of a copy the bytes of the
array that it writes.
"""

import csv
import sys
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

from meshscope.cost.predicted import predicted_times
from meshscope.cost.rates import ArrayTraffic, rates_of
from meshscope.events.enums import Part, Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Program
from meshscope.plans.workload import Workload
from meshscope.units import format_seconds

CSV = Path(__file__).parents[1] / "tools" / "published_parts.csv"
CONTEXT = 1024  # of a decode step that has the layer; the layer does not depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPart:
    """A published time of a part, in seconds, with the predicted one."""

    row: dict[str, str]
    predicted_s: float

    @property
    def published_s(self) -> float:
        """Published seconds."""
        return float(self.row["published_us"]) / 1e6

    @property
    def error(self) -> float:
        """Predicted over published, minus 1."""
        return self.predicted_s / self.published_s - 1

    @property
    def group(self) -> tuple[str, str]:
        """Chip, and kind of the part."""
        kind = ", ".join(filter(None, (self.row["kind"], self.row["half"])))
        return self.row["topology"].partition(":")[0], kind


def published_parts() -> tuple[dict[str, str], ...]:
    """All rows, in order."""
    with CSV.open() as file:
        return tuple(csv.DictReader(file))


def compared_parts() -> tuple[ComparedPart, ...]:
    """All rows with their predicted times, in order."""
    return tuple(ComparedPart(row=row, predicted_s=_predicted_s(row)) for row in published_parts())


def _predicted_s(row: dict[str, str]) -> float:
    if row["kind"].endswith("layer"):
        return layer_s(row)
    rates = rates_of(parse_topology(row["topology"]).chip)
    if row["kind"] == "product":
        m, n, k = map(int, row["what"].split("x"))
        moved = ArrayTraffic(hbm_bytes=2 * (m * k + k * n + m * n), hbm_written_bytes=2 * m * n)
        return rates.roofline(flops=2.0 * prod((m, n, k)), moved=moved).seconds.value_s
    written = int(row["size"])
    read = written if row["what"] == "read and write" else written // 2  # bf16 to f32
    moved = ArrayTraffic(hbm_bytes=read + written, hbm_written_bytes=written)
    return rates.vector_product(0, moved).seconds.value_s


def layer_s(row: dict[str, str]) -> float:
    """The routed experts of one layer with their router and collectives, as the published function has them."""
    model, topology = read_model(row["what"]), parse_topology(row["topology"])
    dispatch = DispatchForm.FUSED if row["kind"].startswith("fused") else DispatchForm.AUTO
    experiment = experiment_of(
        model=model,
        plan=parse_plan(row["plan"]),
        topology=topology,
        workload=Workload(
            batch=int(row["size"]),
            prompt=CONTEXT,
            output=2,
            weight_dtype=row["weight_dtype"],
            cache_dtype=row["weight_dtype"],
        ),
        program=Program(dispatch=dispatch),
    )
    decode = next(t for t in predicted_times(experiment) if t.phase is Phase.DECODE)
    routed = {Part.MOE_ROUTER, Part.MOE_EXPERTS, Part.MOE_DISPATCH, Part.MOE_COMBINE}
    of_experts = [part for part in decode.parts if part.part in routed]
    n_layers = sum(layer.has_experts for layer in model.layers)
    return sum(part.compute_s + part.exposed_s for part in of_experts) / n_layers


def parts() -> None:
    """Prints every row, then each chip and kind with its median and worst error."""
    write, by_group = sys.stdout.write, defaultdict[tuple[str, str], list[float]](list)
    write(
        "| chip | part | size | published | predicted | | half |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    for part in compared_parts():
        row = part.row
        by_group[part.group].append(part.error)
        name = row["what"].rpartition("/")[2]
        what = f"{row['kind']}, {name}" + (f", {row['note']}" if row["note"] else "")
        times = (format_seconds(part.published_s), format_seconds(part.predicted_s))
        size = "" if row["size"] == "1" else f"{int(row['size']):,}"
        cells = (part.group[0], what, size, *times, f"{part.error:+.0%}", row["half"])
        write(f"| {' | '.join(cells)} |\n")
    write("\n| chip | part | number | median | worst |\n| --- | --- | --- | --- | --- |\n")
    for (chip, kind), errors in by_group.items():
        typical, worst = median(map(abs, errors)), max(errors, key=abs)
        write(f"| {chip} | {kind} | {len(errors)} | {typical:.0%} | {worst:+.0%} |\n")
