"""The table of best plans holds what `plan` and `predict` say, for every built-in model."""

import json
import shutil
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import meshscope
from meshscope.events.enums import REQUEST_PHASES
from meshscope.model.catalog import catalog
from meshscope.serving.objective import Goal

ROOT = Path(__file__).parents[1]
SAMPLED = slice(3, None, 83)  # every so many cells


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))


@pytest.fixture
def page() -> ModuleType:
    return import_module("best_plans_table")


def known_cells() -> list[dict[str, Any]]:
    text = (ROOT / "docs" / "evidence" / "best-plans" / "cells.js").read_text("utf-8")
    cells = json.loads(text[text.index("[") : text.rindex("]") + 1])
    return [cell for cell in cells if "options" in cell]


def test_every_model_has_a_cell_for_each_generation_and_goal(page: ModuleType) -> None:
    keys = [(cell["model"], cell["chip"], cell["goal"]) for cell in page.cells()]
    assert len(keys) == len(set(keys))
    assert len(catalog()) >= 100
    missing = {(m, c, g.value) for m in catalog() for c in page.CHIPS for g in Goal} - set(keys)
    assert missing == set(), "run 'make best-plans'"


@pytest.mark.parametrize("cell", known_cells()[SAMPLED], ids=lambda c: f"{c['chip']}-{c['model']}")
def test_cells_are_those_of_the_present_prediction(cell: dict[str, Any]) -> None:
    """Counts and bytes are equal, times within 1 %: else run `make best-plans`."""
    document = meshscope.predict(cell["model"], **cell["options"]).as_dict()
    for phase in (phase.value for phase in REQUEST_PHASES):
        totals = document["totals"].get(phase, {"count": 0, "wire_bytes": 0})
        assert cell["predicted"][phase]["count"] == totals["count"]
        assert cell["predicted"][phase]["wire_bytes"] == round(totals["wire_bytes"])
    assert document["time"]["tpot_s"] == pytest.approx(cell["tpot_s"][0], rel=0.01)
    assert document["memory"]["fits"]


def test_compiled_cells_say_how_they_compare_with_the_prediction() -> None:
    compiled = [cell for cell in known_cells() if cell["compiled"]]
    for cell in compiled:
        assert cell["compiled"]["verdict"] in {"equal", "same meaning", "different"}
        if cell["compiled"]["verdict"] == "equal":
            same = {phase: cell["compiled"][phase]["wire_bytes"] for phase in ("prefill", "decode")}
            assert same == {p: cell["predicted"][p]["wire_bytes"] for p in same}


def test_a_failed_search_is_a_cell_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    program = import_module("best_plans")

    def refuse(*_: object, **__: object) -> None:
        raise meshscope.MeshscopeError("no such slice")

    monkeypatch.setattr(program.meshscope, "plan", refuse)
    cell = program.cell_of("Qwen/Qwen3-32B", "v6e", Goal.THROUGHPUT)
    assert cell["refused"] == "no such slice"


def test_a_search_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = import_module("best_plans")
    monkeypatch.setattr(program, "RUNS", tmp_path)
    key = ("Qwen/Qwen3-0.6B", "v6e", Goal.THROUGHPUT)
    first = program.searched(*key)
    monkeypatch.setattr(program, "cell_of", lambda *_: pytest.fail("it was searched again"))
    assert program.searched(*key) == first
    assert program.read_cells([key]) == [first | {"compiled": None}]


def test_a_compiled_program_stays_on_the_page_while_its_command_is_the_same(tmp_path, monkeypatch):
    program = import_module("best_plans")
    cell = next(cell for cell in known_cells() if cell["compiled"])
    monkeypatch.setattr(program, "RUNS", tmp_path)
    key = (cell["model"], cell["chip"], Goal(cell["goal"]))
    file = (
        tmp_path
        / "cells"
        / f"{cell['chip']}-{cell['goal']}-{cell['model'].replace('/', '--')}.json"
    )
    file.parent.mkdir()
    file.write_text(json.dumps(cell | {"compiled": None}))
    assert program.read_cells([key])[0]["compiled"] == cell["compiled"]
    other = cell | {"compiled": None, "options": cell["options"] | {"batch": 7}}
    file.write_text(json.dumps(other))
    assert program.read_cells([key])[0]["compiled"] is None


def test_the_site_carries_the_run_folder_of_each_cell(tmp_path: Path) -> None:
    program = import_module("best_plans")
    cell = next(cell for cell in known_cells() if cell["model"] == "Qwen/Qwen3-0.6B")
    program.write_runs(tmp_path / "runs", [cell], n_jobs=1)
    (archive,) = (tmp_path / "runs").glob("*.zip")
    shutil.unpack_archive(archive, tmp_path)
    run = meshscope.open(tmp_path / archive.stem).as_dict()
    assert run["time"]["tpot_s"] == pytest.approx(cell["tpot_s"][0], rel=0.2)
    listed = (tmp_path / "runs" / "runs.js").read_text().partition(" = ")[2].rstrip(";\n")
    compiled = Path(program.RUNS, "compiled", (cell["compiled"] or {"run": "none"})["run"])
    assert json.loads(listed) == {archive.name: compiled.is_dir()}
