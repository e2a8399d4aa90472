"""An interrupted command leaves no run and no worker behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

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
