"""Reads trace files, large ones in parallel worker processes."""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshscope.errors import RunFailedError
from meshscope.readers.traces.chakra import read_chakra
from meshscope.readers.traces.chrome import read_chrome
from meshscope.readers.traces.kineto import read_kineto
from meshscope.readers.traces.nsys import read_nsys
from meshscope.readers.traces.trace import Trace, TraceFormat
from meshscope.readers.traces.xplane import read_xplane
from meshscope.store.folder import scratch_folder
from meshscope.workers import WorkerTask, run_worker

MIN_PARALLEL_BYTES = 32 << 20  # a worker takes about a second to start
_READERS: dict[TraceFormat, Callable[[Path], Trace]] = {
    TraceFormat.KINETO: read_kineto,
    TraceFormat.NSYS: read_nsys,
    TraceFormat.XPLANE: read_xplane,
    TraceFormat.CHROME_TPU: read_chrome,
    TraceFormat.CHAKRA: read_chakra,
}


def read_traces(files: Sequence[tuple[Path, TraceFormat]]) -> list[Trace]:
    """One trace for each file; MeshscopeError if one cannot be read, or a worker ran out of memory."""
    readable = [(path, kind) for path, kind in files if kind in _READERS]
    n_bytes = sum(path.stat().st_size for path, _ in readable)
    n_workers = min(len(readable), os.cpu_count() or 1)
    if n_workers < 2 or n_bytes < MIN_PARALLEL_BYTES:
        return [_READERS[kind](path) for path, kind in readable]
    parts = [readable[first::n_workers] for first in range(n_workers)]
    with ThreadPoolExecutor(n_workers) as pool:
        read = list(pool.map(_in_worker, parts))
    return [read[at % n_workers][at // n_workers] for at in range(len(readable))]


def _in_worker(files: Sequence[tuple[Path, TraceFormat]]) -> list[Trace]:
    """What the readers return for these files, which one worker reads one after the other."""
    path = files[0][0]
    task = WorkerTask(
        process=f"{path}: the reader",
        activity="reading this trace and others",
        rejection=f"{path}: this trace or another could not be read",
        memory_remedy="Import fewer files at a time, or shorter traces.",
        crash_remedy="Import the files one by one.",
        error=RunFailedError,
    )
    with scratch_folder() as scratch:
        named = [(str(path), kind.name) for path, kind in files]
        request = {"files": named, "folder": str(scratch)}
        run_worker(f"{__name__}:write_read", request, scratch, task)
        return [
            pickle.loads((scratch / str(index)).read_bytes())  # noqa: S301  our own worker wrote it
            for index in range(len(files))
        ]


def write_read(request: Mapping[str, Any]) -> None:
    """The work of a worker: writes what the readers return, numbered in order, to a folder."""
    for index, (path, kind) in enumerate(request["files"]):
        with Path(request["folder"], str(index)).open("wb") as content:
            pickle.dump(_READERS[TraceFormat[kind]](Path(path)), content)
