"""A worker that crashes or refuses gives one message."""

import errno
import json
from pathlib import Path

import pytest
from made import experiment_with
from tables import table

from meshscope import workers
from meshscope.backends.live.run import RunOptions, run_experiment
from meshscope.errors import RunError, RunFailedError, SpecError
from meshscope.store.folder import new_folder

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
