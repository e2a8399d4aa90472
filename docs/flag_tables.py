"""The table of docs/evidence/compilers.md, from the stored result of its command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshscope.units import format_seconds

STORED = Path(__file__).parent / "evidence" / "flags" / "qwen3-4b.json"
PHASES = ("prefill", "decode")


def effects() -> list[dict[str, Any]]:
    """The effect of every flag on every step."""
    return json.loads(STORED.read_text(encoding="utf-8"))["effects"]


def flag_table() -> Iterator[str]:
    """How many flags change a step, and a row for each of them."""
    every = effects()
    flags = list(dict.fromkeys(effect["flag"] for effect in every))
    changing = [f for f in flags if any(e["flag"] == f and e["is_changed"] for e in every)]
    refused = [f for f in flags if any(e["flag"] == f and e["refused"] for e in every)]
    collectives = {e["flag"] for e in every if e["is_other_collectives"]}
    yield f"Of {len(flags)} flags, {len(changing)} change a step, {len(collectives)} of them its"
    yield f"collectives; {len(refused)} is unknown to the compiler, and the others change nothing."
    yield "Without flags, " + " and ".join(_base(every, phase) for phase in PHASES) + "."
    yield from ("", "| flag | prefill | decode |", "|---|---|---|")
    for flag in changing:
        cells = [_cell(effect) for phase in PHASES for effect in every if _is(effect, flag, phase)]
        yield f"| `{flag}` | {' | '.join(cells)} |"
    yield from ("", f"Unknown to this compiler: {', '.join(f'`{flag}`' for flag in refused)}.")


def _is(effect: dict[str, Any], flag: str, phase: str) -> bool:
    return effect["flag"] == flag and effect["phase"] == phase


def _base(every: list[dict[str, Any]], phase: str) -> str:
    base_s = next(e["base_step_s"] for e in every if e["phase"] == phase and not e["refused"])
    return f"{phase} takes {format_seconds(base_s)}"


def _cell(effect: dict[str, Any]) -> str:
    return ", ".join(_words(effect)) or "-"


def _words(effect: dict[str, Any]) -> Iterator[str]:
    if not effect["is_changed"]:
        return
    if effect["is_other_collectives"]:
        yield "other collectives"
    yield f"time {effect['step_s'] / effect['base_step_s'] - 1:+.1%}"
    n_bytes = effect["total_bytes"] - effect["base_total_bytes"]
    if n_bytes:
        yield f"memory {n_bytes / 1e6:+.2f} MB"
