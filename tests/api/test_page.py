"""The queries of docs/data.md return the answers on the page."""

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from made import TINY

from meshscope.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


class Question(NamedTuple):
    name: str
    query: str
    answer: str


QUESTIONS = [
    Question(*match)
    for match in re.findall(
        r"\*\*(\d+\. .*?)\*\*\n```sql\n(.*?)\n```\n```text\n(.*?)\n```", PAGE, re.DOTALL
    )
]


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["meshscope", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two runs of the page, made by its own commands."""
    folder = tmp_path_factory.mktemp("page")
    commands = re.findall(r"^\$ meshscope (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in commands:
            run(shlex.split(command), patch)
    return folder


def test_there_are_ten_questions() -> None:
    assert [question.name.split(".")[0] for question in QUESTIONS] == [
        str(i + 1) for i in range(10)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_the_answer_is_the_one_on_the_page(question, runs, monkeypatch, capsys) -> None:
    monkeypatch.chdir(runs)
    capsys.readouterr()
    run(["sql", "runs/*", question.query, "--csv"], monkeypatch)
    _, *rows = capsys.readouterr().out.splitlines()
    assert rows == question.answer.splitlines()


NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs here is a tiny model, as random weights for the vocabulary of Qwen3-0.6B take 15 s."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(TINY | {"max_position_embeddings": 256}))
    *cells, runs = code_cells()
    here = runs.replace('meshscope.run("Qwen/Qwen3-0.6B"', 'meshscope.run("tiny.json"')
    assert here != runs
    names: dict[str, Any] = {}
    for cell in (*cells, here):
        exec(compile(cell, str(NOTEBOOK), "exec"), names)
    assert isinstance(names["table"], pl.DataFrame)
    assert names["table"]["tpot_s"].is_sorted()
    assert names["comparison"].as_dict()["explanation"]["sentences"]
    assert (tmp_path / "report.html").stat().st_size > 0
    assert names["compiled"].source == "compiled"
    assert names["compiled"].compare().verdict == "equal"
    assert names["measured"].source == "measured"
    assert names["measured"].time.decode_step_s > 0


def test_colab_opens_the_notebook_and_can_install_meshscope() -> None:
    """README and page link to the file in Colab; its first cell installs an extra that exists."""
    root = NOTEBOOK.parents[1]
    place = "colab.research.google.com/github/OWNER/meshscope/blob/main/"
    for page in ("README.md", "docs/first-steps.md"):
        (path,) = re.findall(re.escape(place) + r"([\w/.]+)", (root / page).read_text("utf-8"))
        assert root / path == NOTEBOOK
    (extra,) = re.findall(r"meshscope\[(\w+)\] @ git\+https://", code_cells()[0])
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    assert extra in project["optional-dependencies"]


def test_cells_hold_no_output() -> None:
    """Output in the file would be of some version; the page shows what is checked."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells)
