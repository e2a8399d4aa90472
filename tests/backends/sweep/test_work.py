"""Runs are made by children: their failures are kept in words, and none outlives the sweep."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tables import table

from meshscope.backends.sweep import folder as folder_module
from meshscope.backends.sweep import queue
from meshscope.backends.sweep.folder import (
    PlannedRun,
    RunCommand,
    SweepFolder,
    locked_folder,
    run_name,
)
from meshscope.backends.sweep.queue import LocalQueue, make_runs, time_left_s
from meshscope.errors import RunError
from meshscope.plans.experiment_record import ExperimentRecord


def planned(name: str, command: RunCommand = RunCommand.PREDICT) -> PlannedRun:
    return PlannedRun(
        name=name,
        command=command,
        words=(name,),
        experiment=ExperimentRecord(),
        options={"model": name},
    )


class Events:
    """Records the reports of a sweep."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []

    def __call__(self, _part: str, step: str, _left_s: float | None) -> None:
        if end := re.match(r"\w+ (\w+): (\w+) in .* s; ", step):
            self.ends.append((end[2], end[1]))


Make = Callable[..., tuple[SweepFolder, Events]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes runs with children that execute `program`; sys.argv[2] is the run's name."""

    def made(program: str, *runs: PlannedRun, n_jobs: int = 1) -> tuple[SweepFolder, Events]:
        monkeypatch.setattr(queue, "CHILD", ("-c", program))
        events = Events()
        with locked_folder(tmp_path / "s") as folder:
            folder.write_mark({})
            local = LocalQueue(folder, force=False)
            make_runs(runs, local, n_jobs=n_jobs, progress=events)
        return SweepFolder(tmp_path / "s"), events

    return made


@table
def test_a_failure_is_kept_in_words_and_stops_nothing(make, program, message) -> None:
    folder, events = make(
        f"import os, sys\nif sys.argv[2] == 'b':\n    {program}", *map(planned, "abc")
    )
    assert folder.failures == {"b": message}
    assert events.ends == [("done", "a"), ("failed", "b"), ("done", "c")]


def test_a_terminated_run_has_not_failed(make: Make) -> None:
    folder, events = make("import os; os.kill(os.getpid(), 15)", planned("a"))
    assert (folder.failures, events.ends[-1]) == ({}, ("interrupted", "a"))


@pytest.mark.slow
def test_so_many_at_a_time_and_live_runs_alone(make: Make, tmp_path: Path) -> None:
    """Each child waits long enough that those that may run beside it have started."""
    runs = [
        planned(name, RunCommand.RUN if name == "c" else RunCommand.PREDICT) for name in "abcde"
    ]
    log = tmp_path / "log"
    make(
        f"import sys, time\nlog = open({str(log)!r}, 'a', buffering=1)\nprint(sys.argv[2], file=log)\n"
        "time.sleep(0.4)\nprint(sys.argv[2], file=log)",
        *runs,
        n_jobs=2,
    )
    running: set[str] = set()
    together: list[set[str]] = []
    for name in log.read_text().splitlines():  # at its start and at its end
        running ^= {name}
        together.append(set(running))
    assert {"a", "b"} in together
    assert {"d", "e"} in together
    assert max(map(len, together)) == 2
    assert all(names == {"c"} for names in together if "c" in names)


@pytest.mark.slow
def test_a_fault_of_the_sweep_ends_its_children(make, tmp_path, monkeypatch) -> None:
    """A child that ignores SIGTERM is ended by force."""
    monkeypatch.setattr(queue, "WAIT_FOR_END_S", 0.5)

    def has_room(_planned: PlannedRun, running: list[PlannedRun], _n_jobs: int) -> bool:
        assert not (tmp_path / "on").exists()
        return not running

    monkeypatch.setattr(queue, "_has_room", has_room)
    program = (
        f"import os, pathlib, signal, time\nsignal.signal(15, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        f"pathlib.Path({str(tmp_path / 'on')!r}).touch()\ntime.sleep(60)"
    )
    with pytest.raises(AssertionError):
        make(program, planned("a"), planned("b"))
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "WAIT_FOR_LOCK_S", 0.2)
    with (
        locked_folder(tmp_path / "s"),
        pytest.raises(RunError, match="another sweep is using"),
        locked_folder(tmp_path / "s"),
    ):
        pass


def test_what_an_interrupted_sweep_left_is_removed(tmp_path: Path) -> None:
    home = tmp_path / "s"
    (home / ".one.partial-999999").mkdir(parents=True)
    (home / ".one.partial-999999" / "manifest.json").write_text(
        '{"tool": "meshscope", "schema": null}'
    )
    (home / ".failures.json.partial").write_text('{"tool"')
    with locked_folder(home):
        assert list(home.iterdir()) == []


@pytest.mark.parametrize("content", ["", "[]", '{"tool": "other", "sweep": 1}', '{"failures": 1}'])
def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    name = "failures.json" if "failures" in content else "sweep.json"
    (tmp_path / name).write_text(content)
    with pytest.raises(RunError), locked_folder(tmp_path):
        pass
    assert (tmp_path / name).read_text() == content


def test_a_run_of_something_else_is_not_done(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(RunError, match="is not a run"):
        SweepFolder(tmp_path).state(planned("a"))


def test_failures_are_kept_and_forgotten(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.set_failure(planned("a"), "why")
    for _ in range(2):
        folder.set_failure(planned("b"), "how")
    folder.set_failure(planned("a"), None)
    assert folder.failures == SweepFolder(tmp_path).failures == {"b": "how"}
    assert json.loads((tmp_path / "failures.json").read_text())["tool"] == "meshscope"


def test_a_name_tells_every_option() -> None:
    names = {run_name("x" * 200, c, w) for c in RunCommand for w in (("a",), ("a", "b"), ("ab",))}
    assert len(names) == 3 * len(RunCommand)
    assert {len(name) for name in names} == {120}


def test_time_left_is_that_of_the_same_commands() -> None:
    predict, run = RunCommand.PREDICT, RunCommand.RUN
    assert time_left_s([], [predict], n_jobs=1) is None
    took = [(predict, 1.0), (predict, 3.0), (run, 10.0)]
    assert time_left_s(took, [predict, predict, run], n_jobs=2) == 2 / 2 + 2 / 2 + 10
    assert time_left_s(took[:2], [run], n_jobs=2) == 2
