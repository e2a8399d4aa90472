"""A child process that is held: it ends when its parent does, however that ends."""

import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshscope.workers.progress import parse_progress

# Called with a part of the work, what happens to it, and the seconds that it has left where known.
Progress = Callable[[str, str, float | None], None]


@contextmanager
def worker_process(
    arguments: Sequence[str],
    log: Path,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    is_heard: bool = True,
) -> Generator[subprocess.Popen[bytes]]:
    """Python with these arguments while the block runs; it holds our pipe, its errors go to `log`.

    So does its standard output where nobody hears it.
    """
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if is_heard else errors,
            stderr=errors,
            env=environment,
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


def followed(child: subprocess.Popen[bytes], what: str, progress: Progress) -> int:
    """Passes on what the child tells until it ends; the code that it ends with."""
    assert child.stdout is not None
    for line in child.stdout:
        heard = parse_progress(line.decode(errors="replace").strip("\r\n"))
        if heard is not None:
            progress(what, *heard)
    return child.wait()
