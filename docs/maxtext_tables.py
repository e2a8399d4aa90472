"""Tables of docs/maxtext.md from the stored steps of MaxText, printed by cog."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "golden" / "engines"))

from engine_steps import replayed

from meshscope.events.enums import Phase, Source
from meshscope.units import format_bytes, format_seconds

TITLES = ("collective", "array", "part", "count", "sent by a device", "exposed")


def collectives(name: str, phase: str) -> None:
    """Prints the collectives of one step by kind, part and array, with the time that nothing hides."""
    with tempfile.TemporaryDirectory() as folder:
        rows = replayed(name, Path(folder) / "run").record.rows
    cells: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.phase is Phase(phase) and row.source is Source.COMPILED:
            array = "unknown" if row.shape is None else f"{row.dtype}{list(row.shape)}"
            key = (str(row.kind), array.replace(" ", ""), str(row.part))
            sums = cells.setdefault(key, [0.0, 0.0, 0.0])
            sums[0] += row.count
            sums[1] += (row.wire_bytes or 0.0) * row.count
            sums[2] += (row.exposed_s or 0.0) * row.count
    lines = [
        (*key, f"{n:.0f}", format_bytes(wire), format_seconds(exposed))
        for key, (n, wire, exposed) in cells.items()
    ]
    table = [TITLES, ("---",) * len(TITLES), *lines]
    sys.stdout.write("\n".join(f"| {' | '.join(line)} |" for line in table) + "\n")
