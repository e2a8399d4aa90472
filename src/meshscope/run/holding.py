"""A child process that holds devices: it ends when its parent does, however that ends."""

import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held_child(
    arguments: Sequence[str],
    log: Path,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Generator[subprocess.Popen[bytes]]:
    """Python with these arguments while the block runs; it holds our pipe, its errors go to `log`."""
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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
