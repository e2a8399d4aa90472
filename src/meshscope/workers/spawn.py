"""Spawns worker processes, which end when their parent ends."""

import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshscope.workers.progress import parse_progress

# Called with a part of the work, its present step, and the seconds that it still needs, if known.
Progress = Callable[[str, str, float | None], None]


@contextmanager
def worker_process(  # noqa: PLR0913  what a process has
    arguments: Sequence[str],
    log: Path,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    is_piped: bool = True,
) -> Generator[subprocess.Popen[bytes]]:
    """Runs Python with these arguments in `folder` while the block runs; standard error goes to `log`.

    The worker's standard input is a pipe that closes when this process ends. Its standard output is
    a pipe, or goes to `log` too if not `is_piped`.
    """
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if is_piped else errors,
            stderr=errors,
            env=environment,
            cwd=folder,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        child.wait()


def forward_progress(child: subprocess.Popen[bytes], part: str, progress: Progress) -> int:
    """Forwards the worker's progress until it ends; returns its exit code."""
    assert child.stdout is not None
    for line in child.stdout:
        report = parse_progress(line.decode(errors="replace").strip("\r\n"))
        if report is not None:
            progress(part, *report)
    return child.wait()
