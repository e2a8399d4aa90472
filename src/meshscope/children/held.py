"""A child process that is held: it ends when its parent does, however that ends."""

import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshscope.children.names import TOLD


@contextmanager
def held_child(
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


def heard(child: subprocess.Popen[bytes], told: Callable[[str], None]) -> int:
    """Passes on what the child tells until it ends; its exit status."""
    assert child.stdout is not None
    for line in child.stdout:
        words = line.decode(errors="replace").strip()
        if words.startswith(TOLD):
            told(words.removeprefix(TOLD))
    return child.wait()
