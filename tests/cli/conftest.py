"""The command line in this process, and runs that it can read."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from meshscope.cli import main


class Outcome(NamedTuple):
    """What a command left: its exit status and what it printed."""

    status: int
    out: str
    err: str


Meshscope = Callable[..., Outcome]


@pytest.fixture
def meshscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Meshscope:
    """Runs the command in an empty folder, at the width of a pipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["meshscope", *arguments])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return run
