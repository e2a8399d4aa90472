"""An interpreter and a uv that stand for those of an environment."""

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Answers `uv venv` and `uv pip install` as PLAN says; logs what it was asked for. As uv, it is first on PATH.
FAKE = """#!{python}
import json, os, pathlib, shutil, sys
plan = json.loads(pathlib.Path({plan!r}).read_text())
arguments = sys.argv[1:]
with open(plan["log"], "a") as log:
    log.write(json.dumps(arguments) + "\\n")
with open(plan["settings"], "a") as settings:
    names = "UV_DEFAULT_INDEX", "UV_INDEX"
    if arguments[0] == "pip":
        settings.write(" ".join(os.environ.get(name, "") for name in names) + "\\n")
if plan["failing"] in arguments:
    sys.exit("ERROR: No matching distribution found for " + plan["failing"])
elif arguments[0] == "venv":
    target = pathlib.Path(arguments[-1]) / "bin"
    target.mkdir(parents=True)
    shutil.copy(__file__, target / "python")
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where environments are made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MESHSCOPE_CACHE", raising=False)
    return tmp_path / "cache" / "meshscope"


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes such an interpreter; `failing` is what its uv cannot find or install."""

    def make(*, failing: str = "") -> Path:
        plan = {"log": str(tmp_path / "asked.jsonl"), "settings": str(tmp_path / "settings")}
        plan["failing"] = failing
        (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        path = tmp_path / "fake-python"
        text = FAKE.format(python=sys.executable, plan=str(tmp_path / "plan.json"))
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        shutil.copy(path, tmp_path / "uv")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return path

    return make
