"""Live runs that fail or are interrupted leave one message and nothing else."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made import experiment_with
from tables import table

from meshscope import workers
from meshscope.backends.live.run import RunOptions, run_experiment
from meshscope.errors import RunError, RunFailedError, SpecError
from meshscope.store.folder import new_folder

ASKED = ("--output", "8", "--prompt", "8", "--out", "runs/r")
COMMANDS = {
    "run": ("run", "MODEL", "--topology", "cpu:2", "--plan", "tp=2", *ASKED),
    "compile": ("compile", "MODEL", "--topology", "v6e:1x1", "--plan", "tp=1", *ASKED),
}


@pytest.mark.tpu
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_leaves_no_folder_and_no_worker(name, number, config_file, tmp_path):
    """After a kill, the next start removes what was left."""
    words = [str(config_file) if word == "MODEL" else word for word in COMMANDS[name]]
    started = subprocess.Popen(
        [sys.executable, "-m", "meshscope", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert any("compiling" in line for line in started.stderr)
    children = subprocess.check_output(["pgrep", "-P", str(started.pid)], text=True)
    started.send_signal(number)
    started.wait()
    started.stderr.close()
    statuses = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert started.returncode == statuses[number]
    left = list((tmp_path / "runs").iterdir())
    assert [path.name for path in left if not path.name.startswith(".")] == []
    assert bool(left) == (number == signal.SIGKILL)
    for child in children.split():
        _wait_for_end(int(child))
    if left:
        with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "runs" / "r", force=False):
            raise ZeroDivisionError
        assert list((tmp_path / "runs").iterdir()) == []


def _wait_for_end(child: int) -> None:
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the child outlives its parent")


EXPERIMENT = r"meta-llama/Llama-3.2-3B \(28 layers, plan 'tp=8'\) on cpu:8"


def run_with_child(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with a worker that executes `program` instead of the experiment."""
    monkeypatch.setattr(workers, "MAIN", ("-c", program))
    experiment = experiment_with("Llama-3.2-3B", "tp=8", "cpu:8")
    run_experiment(experiment, folder, RunOptions(), progress=lambda *_: None)


def failing(kind: str, message: str, *, is_ours: bool = False, number: int | None = None) -> str:
    report = {"type": kind, "message": message, "is_ours": is_ours, "errno": number}
    return f"""print("meshscope: " + {json.dumps({"error": report})!r})"""


@table
def test_a_failing_worker_gives_a_message(program, message, tmp_path, monkeypatch) -> None:
    with pytest.raises(RunFailedError, match=message):
        run_with_child(program, tmp_path, monkeypatch)


def test_a_user_error_in_the_worker_is_passed_on_unchanged(tmp_path, monkeypatch) -> None:
    with pytest.raises(SpecError, match=r"^Use fewer\.$"):
        run_with_child(failing("SpecError", "Use fewer.", is_ours=True), tmp_path, monkeypatch)


def test_a_full_disk_in_the_worker_is_reported_like_one_here(tmp_path, monkeypatch) -> None:
    program = failing("OSError", "No space left on device", number=errno.ENOSPC)
    with (
        pytest.raises(RunError, match=r"cannot write the run '.*r': No space left on device"),
        new_folder(tmp_path / "r", force=False) as folder,
    ):
        run_with_child(program, folder, monkeypatch)
    assert list(tmp_path.iterdir()) == []
