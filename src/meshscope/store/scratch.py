"""Temporary folders, which a later process removes if SIGKILL keeps their own from doing so."""

import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from meshscope.store.folder import is_abandoned, locked

_SCRATCH = re.compile(r"meshscope-(?P<process>\d+)-.+")


@contextmanager
def scratch_folder() -> Generator[Path]:
    """A folder that is removed when the block ends; also removes those of dead processes."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"meshscope-{os.getpid()}-") as name:
        folder = Path(name)
        with locked(folder):
            yield folder


def remove_abandoned(parent: Path) -> None:
    """Removes this user's scratch folders whose processes are dead."""
    for folder in parent.glob("meshscope-*"):
        match = _SCRATCH.fullmatch(folder.name)
        if match is not None and _is_own(folder) and is_abandoned(folder, int(match["process"])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return False
