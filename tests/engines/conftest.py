"""An interpreter that stands for a Python with or without an engine's packages."""

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Answers -m venv, -m pip, and the question for versions, as PLAN says; logs what it was asked for.
FAKE = """#!{python}
import json, os, pathlib, shutil, sys
plan = json.loads(pathlib.Path({plan!r}).read_text())
arguments = sys.argv[1:]
with open(plan["log"], "a") as log:
    log.write(json.dumps(arguments) + "\\n")
if arguments[:2] == ["-m", "venv"]:
    target = pathlib.Path(arguments[2]) / "bin"
    target.mkdir(parents=True)
    shutil.copy(__file__, target / "python")
elif arguments[:2] == ["-m", "pip"]:
    if plan["failing"] in arguments:
        sys.exit("ERROR: No matching distribution found for " + plan["failing"])
elif arguments[0] == "-c":
    print(json.dumps({{"python": plan["python"], **plan["versions"]}}))
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> Callable[..., Path]:
    """Writes such an interpreter; `failing` is what its pip cannot install."""

    def make(*, python: str = "3.12.1", versions: dict[str, str], failing: str = "") -> Path:
        plan = {"python": python, "versions": versions, "failing": failing}
        plan["log"] = str(tmp_path / "asked.jsonl")
        (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        path = tmp_path / "fake-python"
        text = FAKE.format(python=sys.executable, plan=str(tmp_path / "plan.json"))
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return make
