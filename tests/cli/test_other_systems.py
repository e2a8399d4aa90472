"""What needs no compiler starts without the modules and functions that macOS or Windows lack, as far as Linux can show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshscope

# Hides what Linux has and Windows has not, then runs the command line.
WITHOUT_POSIX = """
import os, signal, sys
class Hidden:
    names = {"fcntl", "grp", "pty", "pwd", "readline", "resource", "termios", "tty"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
for module, names in (
    (signal, ("SIGALRM", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1")),
    (os, ("fork", "geteuid", "getpgid", "getuid", "killpg", "mkfifo", "sched_getaffinity", "setsid")),
):
    for name in names:
        delattr(module, name)
from meshscope.cli import main
main()
"""
MODEL = ("Qwen/Qwen3-32B", "--topology", "v6e-8", "--plan", "tp=8")


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    source = {"PYTHONPATH": str(Path(meshscope.__file__).parents[1])}
    command = [sys.executable, "-c", WITHOUT_POSIX, *words]
    return subprocess.run(
        command, cwd=folder, env=os.environ | source, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_what_needs_no_compiler_works_without_posix(tmp_path: Path) -> None:
    for words, answer in (
        (("--help",), "predict"),
        (("predict", *MODEL, "--out", "run"), "TTFT, prefill"),
        (("show", "run"), "TTFT, prefill"),
        (("serve-sim", *MODEL, "--rate", "1"), "stable"),
        (("plan", "Qwen/Qwen3-4B", "--topology", "v6e-4"), "best for"),
        (("report", "run"), "wrote"),
        (("sql", "run", "select count(*) from collectives"), "260"),
    ):
        done = ran(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert answer in done.stdout + done.stderr
    (tmp_path / "sweep.yaml").write_text("experiments: []\n")
    refused = ran(tmp_path, "sweep", "sweep.yaml", "--out", "all")
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
