"""The notebook in the docs runs from its first to its last cell."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in code_cells():
        exec(compile(cell, str(NOTEBOOK), "exec"), names)
    assert isinstance(names["table"], pl.DataFrame)
    assert names["table"]["tpot_s"].is_sorted()
    assert names["comparison"].as_dict()["explanation"]["sentences"]
    assert (tmp_path / "report.html").stat().st_size > 0


def test_cells_hold_no_output() -> None:
    """Output in the file would be of some version; the page shows what is checked."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells)
