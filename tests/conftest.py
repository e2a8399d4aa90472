"""Two tiers of tests: fast ones, and those that compile, run programs or kill processes; the command line."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from meshscope.cli import main

TESTS = Path(__file__).parent
# In the order in which they run, after every fast test.
SLOW_FOLDERS = ("function", "calibrate", "programs", "compile", "live", "torch_xla")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no slow folder, and with it no framework, for a run of the fast tests."""
    is_slow = collection_path.parent == TESTS and collection_path.name in SLOW_FOLDERS
    return True if is_slow and "not slow" in config.option.markexpr else None


def pytest_collection_finish() -> None:
    """Keeps the collector of garbage from visiting what was collected, which lives until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_sessionfinish() -> None:
    """Libraries report what is left when Python ends."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of a slow folder as slow, and runs the slow tests last."""

    def tier(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
            return 2 + SLOW_FOLDERS.index(folder)
        return int(item.get_closest_marker("slow") is not None)

    items.sort(key=tier)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled programs are kept for this session only, in one folder for all of its workers."""
    folder = tmp_path_factory.getbasetemp()
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # whose folder is in that of the session
    os.environ["MESHSCOPE_CACHE"] = str((folder.parent if is_worker else folder) / "programs")


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
