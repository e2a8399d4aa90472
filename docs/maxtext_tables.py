"""Tables of docs/evidence/engines.md from the stored steps of MaxText, printed by cog."""

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "golden" / "engines"))

from engine_steps import replayed

import meshscope
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase, Source
from meshscope.units import format_bytes, format_seconds

STORED = Path(__file__).parents[1] / "tests" / "golden" / "maxtext_training" / "step.hlo.txt.gz"
TRAINING = {
    "topology": "v6e-8",
    "mesh": "fsdp=8",
    "device_order": "0,1,2,3,7,6,5,4",
    "phase": "step",
}
SMALL = 2**20  # bytes
TITLES = ("collective", "array", "part", "count", "sent by a device", "exposed")


def collectives(name: str, phase: str) -> None:
    """Prints the collectives of one step by kind, part and array, with the time that nothing hides."""
    with tempfile.TemporaryDirectory() as folder:
        rows = replayed(name, Path(folder) / "run").record.rows
    _print([r for r in rows if r.phase is Phase(phase) and r.source is Source.COMPILED])


def compared(phase: str) -> None:
    """Prints what `compare` says of our own program (A) and MaxText's (B) in one phase."""
    with tempfile.TemporaryDirectory() as folder:
        textbook, engine = (
            replayed(name, Path(folder) / name) for name in ("llama-own", "llama-maxtext")
        )
        text = meshscope.compare(textbook, engine).text()
    joined = re.sub(r"\n  (?=\S)", " ", text)
    lines = [line for line in joined.splitlines() if line.startswith(f"- {phase}: ")]
    sys.stdout.write("\n".join(lines[1:]) + "\n")  # the first one counts the rows that differ


def whole() -> None:
    """Prints the times of all layers, predicted and compiled, and what the gathers of scales expose."""
    with tempfile.TemporaryDirectory() as folder:
        run = replayed("llama-maxtext-32", Path(folder) / "run").record
    for time in run.times:
        step = time.step
        sys.stdout.write(
            f"- {time.phase}, {time.source}: {format_seconds(step.value_s)} "
            f"({format_seconds(step.low_s or 0)} to {format_seconds(step.high_s or 0)}), of which "
            f"{format_seconds(time.exposed_s)} exposed communication\n"
        )
    gathers = [
        row
        for row in run.rows
        if (row.source, row.phase, row.kind) == (Source.COMPILED, Phase.DECODE, Kind.ALL_GATHER)
        and row.layer is not None
    ]
    exposed = sum((row.exposed_s or 0) * row.count for row in gathers)
    sys.stdout.write(
        f"\nThe {len(gathers)} gathers of scales expose {format_seconds(exposed)} of a decode step.\n"
    )


def training() -> None:
    """Prints the large collectives of the stored training step, and its time."""
    with tempfile.TemporaryDirectory() as folder:
        run = meshscope.import_(STORED, **TRAINING, out=Path(folder) / "run").record
    _print([row for row in run.rows if (row.payload_bytes or 0) > SMALL])
    (time,) = run.times
    sys.stdout.write(
        f"\nThe step takes {format_seconds(time.step.value_s)} ({format_seconds(time.step.low_s or 0)} to "
        f"{format_seconds(time.step.high_s or 0)}); collectives of at most {format_bytes(SMALL)} are left "
        "out of the table.\n"
    )


def _print(rows: list[Collective]) -> None:
    cells: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
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
