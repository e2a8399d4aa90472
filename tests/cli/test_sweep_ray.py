"""`sweep --queue ray` on a cluster of two nodes: same runs as without it, and a lost node costs none."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from meshscope.backends.sweep import queue

DEFAULTS = {"topology": "v6e-8", "batch": 8, "prompt": 16, "output": 2, "layers": 1}
GRID = {"model": "Qwen/Qwen3-4B", "plan": ["tp=8", "dp=2,tp=4", "dp=8", "dp=4,tp=2"]}
WAIT_S = 60.0  # for events that take seconds; a longer wait fails the test

# A command that first finds out on which node it is, and how many commands ran there before.
COMMAND = """
import os, pathlib, runpy, sys, time
from meshscope.workers import end_with_parent
end_with_parent()
folder = pathlib.Path({folder!r})
is_doomed = os.environ["RAY_RAYLET_PID"] == {raylet!r}
first = folder / f"first-{{is_doomed}}"
if not first.exists():
    first.touch()
elif is_doomed:
    (folder / "pid.partial").write_text(str(os.getpid()))
    (folder / "pid.partial").rename(folder / "pid")
    time.sleep(600)
else:
    while not (folder / "pid").exists():
        time.sleep(0.02)
runpy.run_module("meshscope", run_name="__main__", alter_sys=True)
"""


# Ray forks, and JAX warns of it where tests before have imported it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  it takes seconds to import

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONWARNINGS", "default")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
        yield cluster
        cluster.shutdown()


def write(plans: list[str]) -> None:
    Path("s.yaml").write_text(json.dumps({"defaults": DEFAULTS, "grid": GRID | {"plan": plans}}))


def wait_for(path: Path) -> None:
    last = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < last, f"no {path}"
        time.sleep(0.02)


def events(folder: str, run: str) -> pl.DataFrame:
    return pl.read_parquet(Path(folder, run, "events.parquet"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("sys.stderr.write('meshscope: no room.\\n'); sys.exit(1)", "no room."),
        ("os.kill(os.getppid(), 9)", "the Ray task failed (WorkerCrashedError)"),
    ],
)  # fmt: skip
def test_a_failure_is_kept_in_words(meshscope, cluster, monkeypatch, program, message) -> None:
    """Ray tries a command again if its worker process was lost, until that happened four times."""
    write(["tp=8"])
    tries = Path("tries").absolute()
    program = f"import os, sys\nwith open({str(tries)!r}, 'a') as file: file.write('x')\n{program}"
    monkeypatch.setattr(queue, "CHILD", ("-c", program))
    done = meshscope("sweep", "s.yaml", "--queue", "ray", "--address", cluster.address, "--json")
    assert done.status == 1
    [experiment] = json.loads(done.out)["experiments"]
    assert experiment["failure"].startswith(message)
    assert tries.read_text() == ("xxxx" if "Crashed" in message else "x")


@pytest.mark.slow
def test_a_node_lost_half_way_costs_no_run(meshscope, cluster, monkeypatch, tmp_path) -> None:
    """The second command of one node waits to be killed with it; the other node makes its run."""
    write(GRID["plan"])
    [node] = cluster.worker_nodes
    raylet = str(node.all_processes["raylet"][0].process.pid)
    program = COMMAND.format(folder=str(tmp_path), raylet=raylet)
    killed: list[int] = []

    def kill() -> None:
        wait_for(tmp_path / "pid")
        cluster.remove_node(node, allow_graceful=False)
        killed.append(int((tmp_path / "pid").read_text()))

    thread = threading.Thread(target=kill)
    with monkeypatch.context() as patch:
        patch.setattr(queue, "CHILD", ("-c", program))
        thread.start()
        done = meshscope(
            "sweep", "s.yaml", "--out", "ray", "--queue", "ray", "--address", cluster.address
        )
        thread.join()

    assert done.status == 0, done.err
    experiments = json.loads(Path("ray/sweep.json").read_text())["experiments"]
    assert len(experiments) == len(GRID["plan"])
    for experiment in experiments:
        name, words = experiment["run"], experiment["command"][1:]
        assert meshscope(*words, "--out", f"alone/{name}").status == 0
        assert events("ray", name).equals(events("alone", name))
    summary = pl.read_parquet("ray/summary.parquet")
    assert sorted(summary["run"]) == sorted(one["run"] for one in experiments)
    assert not [path for path in Path("ray").iterdir() if path.name.startswith(".")]
    [pid] = killed
    while os.path.exists(f"/proc/{pid}"):  # noqa: PTH110  it ends with its worker
        time.sleep(0.02)


@pytest.mark.slow  # it imports ray
def test_an_address_without_a_cluster_is_refused(meshscope) -> None:
    write(["tp=8"])
    done = meshscope("sweep", "s.yaml", "--queue", "ray", "--address", "127.0.0.1:1")
    assert done.status == 1
    assert "Give HOST:PORT as 'ray start' prints it" in done.err


def test_options_without_effect_are_refused(meshscope) -> None:
    write(["tp=8"])
    assert "Use --queue ray." in meshscope("sweep", "s.yaml", "--address", "127.0.0.1:1").err
    live = {"command": "run", "topology": "cpu:4", "model": "Qwen/Qwen3-4B", "plan": "tp=4"}
    sizes = {"layers": 1, "prompt": 4, "output": 2}
    Path("s.yaml").write_text(json.dumps({"experiments": [live | sizes]}))
    done = meshscope("sweep", "s.yaml", "--queue", "ray")
    assert (done.status, "a sweep with --queue local" in done.err) == (1, True)
