"""The notebook about functions runs from its first to its last cell, and so do the examples of the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.tpu]

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOK = DOCS / "function.ipynb"


def test_every_cell_runs_and_rows_name_their_cell(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # output in the file would be of some version
            text = "".join(cell["source"])
            exec(compile(text, str(tmp_path / f"cell{number}.py"), "exec"), names)
    (row,) = names["run"].record.rows
    assert (row.kind, row.axis) == ("all_reduce", "tp")
    assert row.source_line == f"{tmp_path / 'cell1.py'}:10"
    gather, _ = names["split"].explain()
    assert (gather.row.kind, gather.row.axis) == ("all_gather", "dp")
    assert gather.row.source_line == f"{tmp_path / 'cell1.py'}:9"
    assert (gather.remedy or "").startswith("pass up whole")
    assert names["comparison"].verdict == "different"
    assert names["run"]._repr_html_()


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "your-program.md"
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(example, str(page), "exec"), {})
    assert "all_reduce" in capsys.readouterr().out
