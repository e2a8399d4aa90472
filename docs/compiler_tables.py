"""The tables of docs/evidence/compilers.md, from the stored cells of experiments/compilers.py."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshscope.api.environments import list_compilers
from meshscope.units import format_bytes, format_seconds

STORED = Path(__file__).parent / "evidence" / "compilers" / "cells.jsonl"
COMPILERS = ("jax-0.8.3", "jax-0.10.2", "jax-0.12.0.1")  # oldest first
PHASES = ("prefill", "decode")
SAME_FRAC = 0.005  # a change of a modeled time or of memory below this counts as none

Cell = dict[str, Any]
Cells = Mapping[str, Cell]  # by compiler


def stored_cells() -> list[Cell]:
    """Every stored cell."""
    return [json.loads(line) for line in STORED.read_text(encoding="utf-8").splitlines()]


def compared() -> dict[str, Cells]:
    """The cells of the models that every compiler compiled, by model and compiler."""
    models: dict[str, dict[str, Cell]] = {}
    for cell in stored_cells():
        if cell["compiler"] in COMPILERS and "refused" not in cell:
            models.setdefault(cell["model"], {})[cell["compiler"]] = cell
    return {name: cells for name, cells in models.items() if len(cells) == len(COMPILERS)}


def upgrades() -> Iterator[tuple[str, str]]:
    """Each compiler with the next one."""
    return pairwise(COMPILERS)


def libtpu_of(compiler: str) -> str:
    """The libtpu version of a compiler."""
    return next(c["libtpu"] for c in list_compilers() if c["compiler"] == compiler)


def known() -> Iterator[str]:
    """The compilers that can be installed."""
    yield ("| name | JAX | libtpu | Python |")
    yield ("|---|---|---|---|")
    for c in list_compilers():
        yield (f"| `{c['compiler']}` | {c['jax']} | {c['libtpu']} | {c['least_python']} or newer |")


def extent() -> Iterator[str]:
    """What was compiled, and whether the collectives are the same."""
    models = compared()
    families = {cells[COMPILERS[0]]["family"] for cells in models.values()}
    versions = [libtpu_of(compiler) for compiler in COMPILERS]
    yield (
        f"{len(models)} built-in models, of {len(families)} families, under libtpu "
        f"{', '.join(versions[:-1])} and {versions[-1]}:"
    )
    yield ""
    steps = [(name, phase) for name in models for phase in PHASES]
    for old, new in upgrades():
        other = [
            (name, phase)
            for name, phase in steps
            if what(models[name][old], phase) != what(models[name][new], phase)
        ]
        forms = [
            (name, phase)
            for name, phase in steps
            if how(models[name][old], phase) != how(models[name][new], phase)
        ]
        yield (
            f"- from {libtpu_of(old)} to {libtpu_of(new)}, {len(other)} of {len(steps)} steps have other "
            f"collectives or bytes, and in {len(forms)} they run in another way."
        )


def what(cell: Cell, phase: str) -> Counter[str]:
    """What the collectives of a step do, with their counts and wire bytes."""
    return _counted(cell, phase, ("kind", "axis", "dtype", "shape"), "wire_bytes")


def how(cell: Cell, phase: str) -> Counter[str]:
    """How the collectives of a step run, with their counts."""
    return _counted(cell, phase, ("kind", "axis", "opcode", "is_async", "algorithm"), "count")


def _counted(cell: Cell, phase: str, names: Sequence[str], value: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in cell["phases"][phase]["collectives"]:
        counts[json.dumps([group[name] for name in names])] += group[value]
    return counts


def times() -> Iterator[str]:
    """The modeled time of a step under the oldest compiler, and its change with each next one."""
    return _changes(PHASES, lambda cell, phase: cell["phases"][phase]["step_s"], format_seconds)


def memory() -> Iterator[str]:
    """The memory of a device under the oldest compiler, and its change with each next one."""
    return _changes(("memory",), lambda cell, _: cell["memory"]["total_bytes"], format_bytes)


def _changes(columns: Sequence[str], value: Any, text: Any) -> Iterator[str]:
    newer = [f"to {libtpu_of(new)}" for _, new in upgrades()]
    heads = [head for name in columns for head in (f"{name}, {libtpu_of(COMPILERS[0])}", *newer)]
    yield (f"| model | plan | layers | {' | '.join(heads)} |")
    yield ("|---" * (3 + len(heads)) + "|")
    for name, cells in compared().items():
        oldest = cells[COMPILERS[0]]
        figures: list[str] = []
        for column in columns:
            values = [value(cells[compiler], column) for compiler in COMPILERS]
            figures += [text(values[0]), *(_change(old, new) for old, new in pairwise(values))]
        model = name.rsplit("/", 1)[-1]
        yield (f"| {model} | `{oldest['plan']}` | {oldest['layers']} | {' | '.join(figures)} |")


def _change(old: float, new: float) -> str:
    change = new / old - 1
    return "same" if abs(change) < SAME_FRAC else f"{change:+.1%}"


def forms() -> Iterator[str]:
    """The collectives of a step that run in another way under the next compiler."""
    yield ("| libtpu | model | step | before | after |")
    yield ("|---|---|---|---|---|")
    for old, new in upgrades():
        for name, cells in compared().items():
            phases: dict[tuple[str, str], list[str]] = {}
            for phase in PHASES:
                before, after = how(cells[old], phase), how(cells[new], phase)
                if before != after:
                    gone, made = _described(before - after), _described(after - before)
                    phases.setdefault((gone, made), []).append(phase)
            for (gone, made), steps in phases.items():
                model, to = name.rsplit("/", 1)[-1], f"{libtpu_of(old)} to {libtpu_of(new)}"
                yield (f"| {to} | {model} | {', '.join(steps)} | {gone} | {made} |")


def _described(counts: Counter[str]) -> str:
    return "; ".join(_form(n, *json.loads(form)) for form, n in sorted(counts.items())) or "-"


def _form(n: int, *form: Any) -> str:
    kind, axis, opcode, is_async, algorithm = form
    words = [f"{n} {kind.replace('_', '-')} over {axis}"]
    words += [f"as `{opcode}`"] if opcode != kind.replace("_", "-") else []
    words += ["asynchronous"] if is_async else ["synchronous"]
    words += [f"`{algorithm}`"] if algorithm else []
    return ", ".join(words)
