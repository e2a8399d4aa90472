"""`sweep`: everything is checked first, and any interruption leaves whole runs and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from made import TINY

from meshscope.backends.sweep import queue
from meshscope.events.enums import Source
from meshscope.store.read import read_run

pytestmark = pytest.mark.slow  # starts and kills processes

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SMALL = {"topology": "v6e-8", "batch": 2, "prompt": 16, "output": 2, "layers": 1}
GRID = {"model": ["Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B"], "plan": ["tp=8", "dp=2,tp=4"]}

CONFIG = TINY | {"num_hidden_layers": 1, "num_key_value_heads": 4}


def write(document: dict, path: str = "s.yaml") -> None:
    """JSON is YAML, too."""
    Path(path).write_text(json.dumps(document))


def runs(folder: str = "runs/s") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


def test_a_sweep_makes_every_run_once_and_a_summary(meshscope, monkeypatch) -> None:
    write({"defaults": SMALL, "grid": GRID})
    done = meshscope("sweep", "s.yaml", "--jobs", "2")
    assert (done.status, len(runs())) == (0, 4), done.err
    assert "4 of 4" in done.err
    assert "4 experiments: 4 done; in runs/s" in done.out
    assert all(read_run(Path("runs/s", name)).sources == (Source.PREDICTED,) for name in runs())
    summary = pl.read_parquet("runs/s/summary.parquet")
    assert sorted(summary["run"]) == runs()
    one = json.loads(meshscope("show", f"runs/s/{summary['run'][0]}", "--json").out)
    assert summary["prefill_wire_bytes"][0] == one["totals"]["prefill"]["wire_bytes"]
    assert summary["request_count"][0] == sum(t["request"]["count"] for t in one["totals"].values())
    monkeypatch.setattr(queue, "CHILD", ("-c", "raise SystemExit(1)"))  # nothing is made again
    again = meshscope("sweep", "s.yaml", "--json")
    assert [e["state"] for e in json.loads(again.out)["experiments"]] == ["done"] * 4
    query = "select runs.plan, sum(count) as n from collectives join runs using (run) group by all order by 1"
    rows = json.loads(meshscope("sql", "runs/s", query, "--json").out)
    assert rows == [{"plan": "dp=2,tp=4", "n": 2 * 8}, {"plan": "tp=8", "n": 2 * 8}]
    names = json.loads(meshscope("sql", "runs/s", "select run from runs order by 1", "--json").out)
    assert [row["run"] for row in names] == runs()


def test_every_bad_experiment_is_named_before_the_first_starts(meshscope) -> None:
    plans = ["tp=8", "tp=3", "dp=3,tp=2"]
    bad = [{"model": "Qwen/Qwen3-5B", "plan": "tp=8"}, {"command": "compile", "topology": "cpu:8"}]
    write(
        {
            "defaults": {"model": "Qwen3-4B", "plan": "tp=8", **SMALL},
            "grid": {"plan": plans},
            "experiments": [*bad, {"command": "run", "repeats": 0}, {"repeats": 2}],
        }
    )
    done = meshscope("sweep", "s.yaml")
    assert (done.status, done.out) == (1, "")
    head, *faults = done.err.splitlines()
    assert head == ("meshscope: s.yaml: 6 experiments of 7 cannot run; nothing was started.")
    for fault, words in zip(
        faults,
        [
            *("tp=3", "dp=3,tp=2", "Qwen/Qwen3-5B", "compile needs one, e.g. v6e-8"),
            *("repeats=0 is too small", "is not an option of predict"),
        ],
        strict=True,
    ):
        assert words in fault
    assert not Path("runs").exists()


def test_a_dry_run_lists_and_makes_nothing(meshscope) -> None:
    write({"defaults": SMALL, "grid": GRID})
    done = meshscope("sweep", "s.yaml", "--dry-run")
    assert "to do  predict Qwen/Qwen3-4B v6e-8 dp=2,tp=4 batch=2 prompt=16 output=2" in done.out
    assert "4 experiments: 4 to do" in done.out
    assert not Path("runs").exists()


def test_the_same_experiment_twice_is_one(meshscope) -> None:
    """Also where one of the two writes out what the other leaves to the usual value."""
    write(
        {
            "defaults": SMALL | {"model": "Qwen3-4B"},
            "grid": {"plan": "tp=8", "kernels": ["auto", None]},
        }
    )
    done = meshscope("sweep", "s.yaml")
    assert "1 of 2 experiments are repeated in the file" in done.err
    assert len(runs()) == 1


def test_failures_are_reported_stored_and_retried_on_request(meshscope, monkeypatch) -> None:
    write({"defaults": SMALL | {"model": "Qwen3-4B"}, "grid": {"plan": ["tp=8", "dp=8"], "batch": 8}})  # fmt: skip
    with monkeypatch.context() as patch:
        program = "import sys; sys.stderr.write('meshscope: no room.\\n'); sys.exit(1)"
        patch.setattr(queue, "CHILD", ("-c", program))
        done = meshscope("sweep", "s.yaml", "--json")
    assert done.status == 1
    assert "2 of 2 experiments failed" in done.err
    assert [e["failure"] for e in json.loads(done.out)["experiments"]] == ["no room."] * 2
    again = meshscope("sweep", "s.yaml")
    assert (again.status, runs()) == (1, [])
    assert "2 experiments: 0 done before, 2 failed before" in again.err
    assert meshscope("sweep", "s.yaml", "--retry-failed").status == 0
    assert len(runs()) == 2
    assert json.loads(Path("runs/s/failures.json").read_text())["failures"] == {}


def test_a_run_of_another_model_of_the_same_name_is_not_taken_for_done(meshscope) -> None:
    """The config that the sweep file names was changed after the sweep."""
    write(CONFIG, "small.json")
    write({"defaults": SMALL, "experiments": [{"model": "small.json", "plan": "tp=4,dp=2", "batch": 4}]})  # fmt: skip
    assert meshscope("sweep", "s.yaml").status == 0
    write(CONFIG | {"vocab_size": 128}, "small.json")
    done = meshscope("sweep", "s.yaml")
    assert done.status == 1
    assert "holds a run of another model" in done.err
    assert meshscope("sweep", "s.yaml", "--force").status == 0
    assert read_run(Path("runs/s", *runs())).manifest.experiment.architecture.vocab == 128


def test_a_damaged_run_is_told_and_made_again_when_asked(meshscope) -> None:
    write({"defaults": SMALL, "experiments": [{"model": "Qwen3-4B", "plan": "tp=8"}]})
    assert meshscope("sweep", "s.yaml").status == 0
    events = Path("runs/s", *runs(), "events.parquet")
    events.write_bytes(b"x")
    done = meshscope("sweep", "s.yaml")
    assert (done.status, "damaged" in done.err, events.read_bytes()) == (1, True, b"x")
    assert meshscope("sweep", "s.yaml", "--force").status == 0
    assert events.read_bytes() != b"x"


def test_a_folder_of_something_else_is_left_alone(meshscope) -> None:
    write({"defaults": SMALL, "experiments": [{"model": "Qwen3-4B", "plan": "tp=8"}]})
    Path("mine").mkdir()
    Path("mine/thesis").write_text("x")
    for options in ((), ("--dry-run",), ("--force",)):
        done = meshscope("sweep", "s.yaml", "--out", "mine", *options)
        assert (done.status, "is not the folder of a sweep" in done.err) == (1, True)
    assert [path.name for path in Path("mine").iterdir()] == ["thesis"]


def started(folder: Path) -> subprocess.Popen:
    """A sweep in a group of processes of its own."""
    command = [sys.executable, "-m", "meshscope", "sweep", "s.yaml"]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_a_half_written_run(sweep: subprocess.Popen, folder: Path) -> None:
    while sweep.poll() is None and not list(folder.glob("runs/s/.*.partial-*")):
        time.sleep(0.002)


def wait_for_another_run(sweep: subprocess.Popen, folder: Path, n_before: int) -> None:
    while sweep.poll() is None and len(whole_runs(folder)) == n_before:
        time.sleep(0.002)


def whole_runs(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each manifest: they change if a run is made again."""
    stats = {p.parent.name: p.stat() for p in folder.glob("runs/s/[!.]*/manifest.json")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def test_kills_lose_nothing_and_repeat_nothing(meshscope, tmp_path: Path) -> None:
    """Half of the kills hit a run that is being written, half one that was just finished."""
    write({"defaults": SMALL, "grid": GRID | {"batch": [2, 4, 6]}})
    seen: dict[str, tuple[int, int]] = {}
    n_half_written = 0
    for number in range(6):
        sweep = started(tmp_path)
        if number % 2:
            wait_for_a_half_written_run(sweep, tmp_path)
        else:
            wait_for_another_run(sweep, tmp_path, len(seen))
        if sweep.poll() is None:  # else a slow machine has finished all runs between two kills
            os.killpg(sweep.pid, signal.SIGKILL)
        sweep.communicate()
        n_half_written += bool(list(tmp_path.glob("runs/s/.*.partial-*")))
        complete = whole_runs(tmp_path)
        assert {name: complete.get(name) for name in seen} == seen
        seen = complete
    assert n_half_written > 0
    assert len(seen) > 0

    last = meshscope("sweep", "s.yaml", "--json")

    assert last.status == 0, last.err
    complete = whole_runs(tmp_path)
    assert {name: complete.get(name) for name in seen} == seen
    documents = json.loads(last.out)["experiments"]
    assert {Path(e["run"]).name for e in documents} == set(complete)
    assert (len(documents), len(complete)) == (12, 12)
    kept = {path.name for path in tmp_path.glob("runs/s/*") if path.is_file()}
    assert kept == {"sweep.json", "summary.parquet"}
    assert [p.name for p in Path("runs/s").iterdir() if p.name.startswith(".")] == []
    for name in complete:
        read_run(Path("runs/s", name))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing_half(tmp_path: Path, meshscope, number: int) -> None:
    """Ctrl-C reaches the whole group, as a terminal sends it."""
    write({"defaults": SMALL, "grid": GRID | {"plan": "tp=8"}})
    sweep = started(tmp_path)
    wait_for_a_half_written_run(sweep, tmp_path)
    os.killpg(sweep.pid, number)
    _, err = sweep.communicate(timeout=30)
    assert sweep.returncode == (130 if number == signal.SIGINT else 143)
    assert "Traceback" not in err
    assert list(tmp_path.glob("runs/s/.*")) == []
    assert not (tmp_path / "runs/s/failures.json").exists()
    assert meshscope("sweep", "s.yaml").status == 0
    assert len(runs()) == 2


def test_runs_end_with_a_sweep_that_was_killed_alone(tmp_path: Path, meshscope) -> None:
    """The next sweep waits for them, and makes nothing twice."""
    write({"defaults": SMALL, "grid": GRID | {"plan": "tp=8"}})
    sweep = started(tmp_path)
    wait_for_a_half_written_run(sweep, tmp_path)
    sweep.kill()
    sweep.communicate()
    assert meshscope("sweep", "s.yaml").status == 0
    assert len(runs()) == 2
    assert list(Path("runs/s").glob(".*")) == []


@pytest.mark.parametrize("name", ["seed-plan", "seed-plan-compile"])
def test_the_sweeps_of_the_project_can_be_started(meshscope, name: str) -> None:
    done = meshscope("sweep", str(EXPERIMENTS / f"{name}.yaml"), "--dry-run", "--json")
    assert done.status == 0, done.err
    experiments = json.loads(done.out)["experiments"]
    complete = {e["options"]["model"] for e in experiments}
    assert complete == {
        "Qwen/Qwen3-32B",
        "deepseek-ai/DeepSeek-V2-Lite",
        "deepseek-ai/DeepSeek-V3.1-Base",
        "deepseek-ai/DeepSeek-V4.1-Flash",
    }
    plans = ",".join(e["options"]["plan"] for e in experiments)
    assert all(axis in plans for axis in ("tp=8", "sp", "dp=2", "pp=2", "fsdp=8", "ep=8"))
    assert "more than once" not in done.err
