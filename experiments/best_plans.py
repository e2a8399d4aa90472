"""The best plan of every built-in model on five TPU generations: `make best-plans`, for docs/evidence/best-plans.md.

    python experiments/best_plans.py              search what is missing, then write docs/evidence/best-plans/cells.js
    python experiments/best_plans.py --renew      predict the published winners again, and search new models (minutes)
    python experiments/best_plans.py --compile v6e   also compile the winners on one generation (hours for all)
    python experiments/best_plans.py --runs FOLDER   write the run folder of every published cell, as archives

A cell is one model on one generation with one goal. For `throughput`, `meshscope.plan` chooses the smallest
slice that answers within SLO, the plan, the batch and the precision; for `latency`, the plan with the least
time of a request on eight chips, or on that smallest slice if it is larger. Each answer is a file in
`runs/best-plans/cells`, so an interrupted search goes on. Compiled winners are the runs of a sweep in
`runs/best-plans/compiled`, which resumes, too.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import meshscope
from meshscope.api.plan import PlanResult
from meshscope.api.run import Run
from meshscope.errors import MeshscopeError
from meshscope.events.enums import REQUEST_PHASES
from meshscope.model.catalog import catalog
from meshscope.serving.objective import Goal
from meshscope.store.read import read_run

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "best-plans"
PAGE = ROOT / "docs" / "evidence" / "best-plans" / "cells.js"
PREFIX = "window.meshscopeBestPlans = "

EIGHT_CHIPS = {
    "v4": "v4:2x2x2",
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x2",
    "v6e": "v6e:2x4",
    "tpu7x": "tpu7x:2x2x2",
}
PROMPT, OUTPUT = 1024, 128
SLO = "ttft=2,tpot=0.05"

Cell = dict[str, Any]
Key = tuple[str, str, Goal]  # model, generation, goal


def cell_of(model: str, chip: str, goal: Goal) -> Cell:
    """The best plan of a model on one generation, its collectives and times; a refusal names the reason."""
    about: Cell = {"model": model, "chip": chip, "goal": goal.value}
    try:
        result = _search(model, chip, goal)
    except MeshscopeError as error:
        return about | {"refused": str(error)}
    if result is None or result.winner is None:
        return about | {"refused": f"no slice of {chip} answers within {SLO}"}
    document = result.as_dict()
    best = document["winner"]
    options = {
        "topology": document["topology"],
        "plan": best["plan"],
        "batch": best["batch"],
        "prompt": PROMPT,
        "output": OUTPUT,
        "weight_dtype": best["weight_dtype"],
        "cache_dtype": best["cache_dtype"],
        "prefill_chunk": best["prefill_chunk"] or "off",
    }
    return about | {"chips": document["n_chips"], "options": options, **_predicted(model, options)}


def _search(model: str, chip: str, goal: Goal) -> PlanResult | None:
    """The search for the goal; None if no slice is large enough for the limits."""
    if goal is Goal.THROUGHPUT:
        return meshscope.plan(model, topology=chip, slo=SLO, prompt=PROMPT, output=OUTPUT)
    smallest = searched(model, chip, Goal.THROUGHPUT)
    if "refused" in smallest:
        return None
    topology, n_chips = EIGHT_CHIPS[chip], 8
    if smallest["chips"] > n_chips:
        topology, n_chips = smallest["options"]["topology"], smallest["chips"]
    return meshscope.plan(
        model, topology=topology, goal=goal, batch=n_chips, prompt=PROMPT, output=OUTPUT
    )


def searched(model: str, chip: str, goal: Goal) -> Cell:
    """The cell from its file, which is written first if it is missing."""
    file = _file((model, chip, goal))
    if not file.exists():
        _write(file, json.dumps(cell_of(model, chip, goal), indent=1))
    return json.loads(file.read_text("utf-8"))


def _predicted(model: str, options: Mapping[str, Any]) -> Cell:
    """What `predict` says about the winner: times with intervals, memory, collectives by kind."""
    run = meshscope.predict(model, **options)
    document = run.as_dict()
    time, memory = document["time"], document["memory"]
    steps = time["steps"]
    return {
        "ttft_s": [time["ttft_s"], *time["intervals"]["ttft_s"]],
        "tpot_s": [time["tpot_s"], *time["intervals"]["tpot_s"]],
        "is_extrapolated": time["is_extrapolated"],
        "tokens_per_s_per_chip": document["throughput"]["output_tokens_per_s"]
        / document["experiment"]["n_chips"],
        "total_bytes": memory["total_bytes"],
        "hbm_bytes": memory["hbm_bytes"],
        "exposed_frac": {p: steps[p]["exposed_s"] / steps[p]["step"]["s"] for p in steps},
        "why": document["why"],
        "predicted": _communication(document),
    }


def _communication(document: Mapping[str, Any]) -> Cell:
    """Count and wire bytes of a step of each phase, and the count of each kind."""
    totals: Cell = {}
    for phase in (phase.value for phase in REQUEST_PHASES):
        rows = [row for row in document["collectives"] if row["phase"] == phase]
        kinds: dict[str, int] = {}
        for row in rows:
            kinds[row["kind"]] = kinds.get(row["kind"], 0) + row["count"]
        figures = document["totals"].get(phase, {"count": 0, "wire_bytes": 0})
        totals[phase] = {
            "count": figures["count"],
            "wire_bytes": round(figures["wire_bytes"]),
            "kinds": kinds,
        }
    return totals


def models() -> list[str]:
    """Every built-in model."""
    return list(catalog())


def wanted(chips: Iterable[str] = tuple(EIGHT_CHIPS)) -> list[Key]:
    """Every cell: model, generation and goal."""
    return [(model, chip, goal) for chip in chips for goal in Goal for model in models()]


def _file(key: Key) -> Path:
    return RUNS / "cells" / f"{_name(*key)}.json"


def _name(model: str, chip: str, goal: str) -> str:
    return f"{chip}-{goal}-{model.replace('/', '--')}"


def search_cells(keys: Sequence[Key], *, n_jobs: int) -> None:
    """Writes the missing cells, several at a time."""
    missing = [key for key in keys if not _file(key).exists()]
    with _processes(n_jobs) as pool:
        cells = {pool.submit(searched, *key): key for key in missing}
        for n_done, cell in enumerate(as_completed(cells), start=1):
            cell.result()
            sys.stderr.write(f"{n_done}/{len(missing)} {' '.join(cells[cell])}\n")


def _processes(n_jobs: int) -> ProcessPoolExecutor:
    """New processes: a fork of one that has threads, as Parquet's, can wait for their locks forever."""
    return ProcessPoolExecutor(n_jobs, mp_context=get_context("spawn"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def compile_cells(cells: Iterable[Cell], *, n_jobs: int) -> None:
    """Compiles the winners that communicate, with scanned layers, as a sweep that resumes; latency comes first."""
    wanted_cells = [cell for cell in cells if "options" in cell and _is_compiled(cell)]
    experiments = [
        {"command": "compile", "model": cell["model"], "loop": "scan", **cell["options"]}
        for cell in sorted(wanted_cells, key=lambda cell: cell["goal"])
    ]
    file = RUNS / "compiled.json"  # JSON is YAML
    _write(file, json.dumps({"experiments": experiments}, indent=1))
    sweep = [
        "sweep",
        str(file),
        "--out",
        str(RUNS / "compiled"),
        "--jobs",
        str(n_jobs),
        "--retry-failed",
    ]
    subprocess.run([sys.executable, "-m", "meshscope", *sweep], cwd=ROOT, check=False)


def _is_compiled(cell: Cell) -> bool:
    """Whether the winner communicates, so that its program says more than the prediction."""
    return cell["predicted"]["prefill"]["count"] > 0


def read_cells(keys: Iterable[Key]) -> list[Cell]:
    """The cells that were searched, with what the compiler made of them where it did.

    A program that was compiled for the published page and is not here counts as long as its command is the same.
    """
    cells = [json.loads(_file(key).read_text("utf-8")) for key in keys if _file(key).exists()]
    compiled = {_command_key(cell): cell["compiled"] for cell in published() if cell["compiled"]}
    compiled |= _compiled()
    return [cell | {"compiled": compiled.get(_command_key(cell))} for cell in cells]


def published() -> list[Cell]:
    """The cells of the page."""
    text = PAGE.read_text("utf-8")
    return json.loads(text[text.index("[") : text.rindex("]") + 1])


def _compiled() -> dict[tuple[Any, ...], Cell]:
    """Communication, verdict and folder of each compiled run, by its options."""
    compiled: dict[tuple[Any, ...], Cell] = {}
    for path in sorted(
        (RUNS / "compiled").glob("[!.]*/manifest.json")
    ):  # none that is half-written
        run = Run(record=read_run(path.parent))
        document = run.as_dict()
        workload = document["experiment"]["workload"]
        key = (
            run.experiment.model_name,
            document["experiment"]["topology"],
            document["experiment"]["plan"],
        )
        key += tuple(workload[name] for name in ("batch", "weight_dtype", "cache_dtype"))
        compiled[key] = {
            **_communication(document),
            "verdict": document["verdict"]["verdict"],
            "memory_bytes": document["memory"]["total_bytes"],
            "run": path.parent.name,
        }
    return compiled


def _command_key(cell: Cell) -> tuple[Any, ...]:
    options = cell.get("options", {})
    names = ("topology", "plan", "batch", "weight_dtype", "cache_dtype")
    return (cell["model"], *(options.get(name) for name in names))


def publish(cells: Sequence[Cell]) -> None:
    """Writes the data of the page, one cell a line."""
    lines = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in cells)
    _write(PAGE, f"{PREFIX}[\n{lines}\n];")


def renewed(key: Key, cell: Cell | None) -> Cell:
    """The published cell with what `predict` says about its winner now; without one, the searched cell."""
    if cell is None:
        return searched(*key) | {"compiled": None}
    if "options" not in cell:
        return cell
    cell = cell | _predicted(cell["model"], cell["options"])
    compiled = cell["compiled"]
    if compiled and {phase: compiled[phase] for phase in cell["predicted"]} == cell["predicted"]:
        cell["compiled"] = compiled | {"verdict": "equal"}
    return cell


def write_runs(folder: Path, cells: Iterable[Cell], *, n_jobs: int) -> None:
    """Archives `<generation>-<goal>-<model>.zip` with the run folder of each cell, for the site.

    It is that of the compiled program where `runs/best-plans/compiled` has it, else that of the prediction.
    `runs.js` beside them lists the archives for the page: true for a compiled program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = [cell for cell in cells if "options" in cell]
    with _processes(n_jobs) as pool:
        is_compiled = dict(pool.map(_write_run, known, repeat(folder), chunksize=8))
    _write(folder / "runs.js", f"window.meshscopeBestPlanRuns = {json.dumps(is_compiled)};")


def _write_run(cell: Cell, folder: Path) -> tuple[str, bool]:
    """Writes the archive of a cell; its name, and whether it holds the compiled program."""
    name = _name(cell["model"], cell["chip"], cell["goal"])
    compiled = RUNS / "compiled" / (cell["compiled"] or {"run": "none"})["run"]
    with TemporaryDirectory() as work:
        run = Path(work) / name
        if compiled.is_dir():
            shutil.copytree(compiled, run)
        else:
            meshscope.predict(cell["model"], **cell["options"]).save(run)
        shutil.make_archive(str(folder / name), "zip", work, name)
    return f"{name}.zip", compiled.is_dir()


def main() -> None:
    """Searches, compiles if asked, and publishes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--compile", action="append", default=[], choices=EIGHT_CHIPS, metavar="CHIP"
    )
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="only write the run folders")
    parser.add_argument("--renew", action="store_true", help="predict the winners again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    asked = parser.parse_args()
    if asked.runs:
        write_runs(asked.runs, published(), n_jobs=asked.jobs)
        return
    if asked.renew:
        with _processes(asked.jobs) as pool:
            known = {(cell["model"], cell["chip"], cell["goal"]): cell for cell in published()}
            cells = [known.get(key) for key in wanted()]
            publish(list(pool.map(renewed, wanted(), cells, chunksize=16)))
        return
    search_cells(wanted(), n_jobs=asked.jobs)
    if asked.compile:
        compile_cells(read_cells(wanted(asked.compile)), n_jobs=1)
    publish(read_cells(wanted()))


if __name__ == "__main__":
    main()
