"""Scratch folders end with their process, or with the next one."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meshscope.store.folder import scratch_folder

HOLD = """
import time
from meshscope.store.folder import scratch_folder
with scratch_folder() as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_is_removed_at_the_end(temporary: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == temporary
        assert folder.name.startswith(f"meshscope-{os.getpid()}-")
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next(temporary: Path) -> None:
    (temporary / "meshscope-notes").mkdir()  # not one of ours
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as child:
        left = Path(child.stdout.readline().strip())
        with scratch_folder():
            assert left.exists()  # its process lives
        child.send_signal(signal.SIGKILL)
    assert (left / "file").exists()
    with scratch_folder():
        assert not left.exists()
    assert [path.name for path in temporary.iterdir()] == ["meshscope-notes"]
