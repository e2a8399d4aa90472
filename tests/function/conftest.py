"""Functions of a user, and a cache of compiled programs of their own."""

import os
import sys
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent))  # for programs


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled programs are kept for this session only."""
    os.environ["MESHSCOPE_CACHE"] = str(tmp_path_factory.mktemp("programs"))


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written beside the tests."""
    monkeypatch.chdir(tmp_path)
