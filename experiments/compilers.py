"""Every built-in model under several versions of libtpu: `make compilers`, for docs/evidence/compilers.md.

    python experiments/compilers.py                compile what is missing, then write the data of the page
    python experiments/compilers.py jax-0.9.2      with these compilers only
    python experiments/compilers.py --models 20    the first models only, one of each family first

A cell is one model under one compiler: the first layers, which have every kind of layer of the model, of
prefill and decode for v6e-8. The compilers are those of `meshscope compilers`; one that is not installed
stops the program with the command that installs it. Each cell is a line of the data, so an interrupted
program goes on.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import meshscope
from meshscope.api.run import Run
from meshscope.errors import CompileError, MeshscopeError
from meshscope.events.enums import Source
from meshscope.model.catalog import catalog
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.programs.environments import compiler_of

DATA = Path(__file__).parents[1] / "docs" / "evidence" / "compilers" / "cells.jsonl"
COMPILERS = ("jax-0.8.3", "jax-0.10.2", "jax-0.12.0.1")
TOPOLOGY = "v6e-8"
REQUEST = {"batch": 8, "prompt": 256, "output": 128}
DENSE_PLANS = ("tp=8", "dp=2,tp=4", "dp=4,tp=2", "dp=8")  # the first that the model allows
EXPERT_PLANS = ("dp=2,tp=4,ep=8", "dp=8,ep=8", *DENSE_PLANS)

Cell = dict[str, Any]


def models() -> tuple[str, ...]:
    """Every built-in model: one of each family first, and those that compile quickly before others."""
    names = list(catalog())
    first = {read_model(name).family: name for name in reversed(names)}
    chosen = sorted((name for name in names if name in first.values()), key=_size)
    return tuple(dict.fromkeys((*chosen, *names)))


def _size(name: str) -> tuple[bool, int]:
    """Whether a model has experts, and its layers in the program."""
    model = read_model(name)
    return model.moe is not None, n_layers_of(model)


def n_layers_of(model: Model) -> int:
    """The fewest first layers that have every kind of layer of the model."""
    kinds = set(model.layers)
    return next(n for n in range(1, len(model.layers) + 1) if set(model.layers[:n]) == kinds)


def plan_of(name: str) -> str:
    """The first plan that the model allows on the slice."""
    has_experts = read_model(name).moe is not None
    refusals: list[str] = []
    for plan in EXPERT_PLANS if has_experts else DENSE_PLANS:
        try:
            meshscope.predict(name, topology=TOPOLOGY, plan=plan, layers=1, **REQUEST)
        except MeshscopeError as error:
            refusals.append(str(error))
        else:
            return plan
    raise MeshscopeError(f"{name} has no plan: {refusals[0]}")


def cell_of(name: str, compiler: str) -> Cell:
    """What one compiler makes of one model; `refused` is its message if it makes nothing."""
    model = read_model(name)
    options = {"plan": plan_of(name), "layers": n_layers_of(model), "topology": TOPOLOGY}
    about = {"model": name, "family": str(model.family), "compiler": compiler, **options, **REQUEST}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            run = meshscope.compile(name, compiler=compiler, out=out, **options, **REQUEST)
        except CompileError as error:
            return {**about, "refused": str(error).splitlines()[0][:400]}
        return {**about, **measures_of(run)}


def measures_of(run: Run) -> Cell:
    """Versions, memory on a device, and collectives and times of a step of each phase."""
    memory = run.memory
    assert memory is not None
    times = {time.phase: time for time in run.record.times_of(Source.COMPILED)}
    versions = run.record.manifest.versions
    return {
        "versions": {name: versions[name] for name in ("jax", "libtpu")},
        "memory": {"total_bytes": memory.total_bytes, "temp_bytes": memory.temp_bytes},
        "phases": {
            phase.value: {
                "step_s": time.step.value_s,
                "exposed_s": time.exposed_s,
                "collectives": collectives_of(run, phase),
            }
            for phase, time in times.items()
        },
    }


def collectives_of(run: Run, phase: str) -> list[Cell]:
    """The collectives of a step, grouped by what they do and how they run."""
    names = ("kind", "axis", "dtype", "shape", "opcode", "is_async", "algorithm")
    groups: dict[str, Cell] = {}
    for row in run.record.rows_of(Source.COMPILED):
        if row.phase != phase:
            continue
        group: Cell = {name: getattr(row, name) for name in names}
        key = json.dumps(group, default=str)
        kept = groups.setdefault(key, {**group, "count": 0, "wire_bytes": 0.0})
        kept["count"] += row.count
        kept["wire_bytes"] += float(row.wire_bytes * row.count)
    return [groups[key] for key in sorted(groups)]


def read_cells(path: Path = DATA) -> list[Cell]:
    """The cells of the data."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def missing(cells: Iterable[Cell], names: Iterable[str], compilers: Iterable[str]) -> Iterator[Any]:
    """The pairs of model and compiler without a cell, model by model."""
    done = {(cell["model"], cell["compiler"]) for cell in cells}
    compilers = tuple(compilers)
    return ((n, c) for n in names for c in compilers if (n, c) not in done)


def main() -> None:
    """Compiles the missing cells, and writes each at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("compilers", nargs="*", default=COMPILERS)
    parser.add_argument("--models", type=int, help="so many models")
    options = parser.parse_args()
    try:
        for name in options.compilers:
            compiler_of(name)
        DATA.parent.mkdir(exist_ok=True)
        for name, compiler in missing(read_cells(), models()[: options.models], options.compilers):
            sys.stderr.write(f"{name} with {compiler}\n")
            line = json.dumps(cell_of(name, compiler), default=str)
            with DATA.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    except MeshscopeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
