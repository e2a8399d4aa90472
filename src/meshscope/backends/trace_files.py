"""Reads trace files, large ones in parallel worker processes.

A worker is started as `python -m meshscope.backends.trace_files FOLDER PATH FORMAT PATH FORMAT ...`.
It writes what the readers return to FOLDER, a scratch folder of the process that started it.
"""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshscope.errors import RunFailedError
from meshscope.readers.profile.session import profile_of
from meshscope.readers.traces.chrome import ChromeTrace, read_chrome
from meshscope.readers.traces.kineto import read_kineto
from meshscope.readers.traces.nsys import read_nsys
from meshscope.readers.traces.trace import Trace, TraceFormat
from meshscope.readers.traces.xplane import read_xplane, trace_of_profile
from meshscope.store.folder import scratch_folder
from meshscope.workers import (
    WorkerTask,
    end_with_parent,
    error_report,
    reported,
    run_worker,
)

Read = Trace | ChromeTrace

MIN_PARALLEL_BYTES = 32 << 20  # a worker takes about a second to start
_READERS: dict[TraceFormat, Callable[[Path], Read]] = {
    TraceFormat.KINETO: read_kineto,
    TraceFormat.NSYS: read_nsys,
    TraceFormat.XPLANE: read_xplane,
    TraceFormat.CHROME_TPU: read_chrome,
}


def read_traces(files: Sequence[tuple[Path, TraceFormat]]) -> list[Trace]:
    """One trace for each file, and one for all that the TPU profiler exported.

    MeshscopeError if a file cannot be read, or a worker ran out of memory.
    """
    readable = [(path, kind) for path, kind in files if kind in _READERS]
    n_bytes = sum(path.stat().st_size for path, _ in readable)
    n_workers = min(len(readable), os.cpu_count() or 1)
    if n_workers > 1 and n_bytes >= MIN_PARALLEL_BYTES:
        parts = [readable[first::n_workers] for first in range(n_workers)]
        with ThreadPoolExecutor(n_workers) as pool:
            read_parts = list(pool.map(_in_worker, parts))
        reads = [read_parts[at % n_workers][at // n_workers] for at in range(len(readable))]
    else:
        reads = [_READERS[kind](path) for path, kind in readable]
    exported = [read for read in reads if isinstance(read, ChromeTrace)]
    traces = [read for read in reads if isinstance(read, Trace)]
    return [*traces, *([_exported(exported)] if exported else [])]


def _exported(files: Sequence[ChromeTrace]) -> Trace:
    return trace_of_profile(
        profile_of([file.space for file in files]),
        TraceFormat.CHROME_TPU,
        n_events=sum(file.n_events for file in files),
        findings=[finding for file in files for finding in file.findings],
    )


def _in_worker(files: Sequence[tuple[Path, TraceFormat]]) -> list[Read]:
    """What the readers return for these files, which one worker reads one after the other."""
    with scratch_folder() as scratch:
        report = scratch / "report.json"
        named = [text for path, kind in files for text in (str(path), kind.name)]
        arguments = ("-m", __name__, str(scratch), *named)
        run_worker(arguments, report, _task(files[0][0]))
        return [
            pickle.loads((scratch / str(index)).read_bytes())  # noqa: S301  our own worker wrote it
            for index in range(len(files))
        ]


def _task(path: Path) -> WorkerTask:
    return WorkerTask(
        process=f"{path}: the reader",
        activity="reading this trace and others",
        rejection=f"{path}: this trace or another could not be read",
        memory_remedy="Import fewer files at a time, or shorter traces.",
        crash_remedy="Import the files one by one.",
        error=RunFailedError,
    )


def main(arguments: list[str]) -> int:
    """Reads files and writes what their readers return, numbered in order, to a folder."""
    end_with_parent()
    scratch, files = Path(arguments[0]), arguments[1:]

    def read() -> dict[str, str]:
        for index, (path, kind) in enumerate(zip(files[::2], files[1::2], strict=True)):
            with (scratch / str(index)).open("wb") as content:
                pickle.dump(_READERS[TraceFormat[kind]](Path(path)), content)
        return {}

    report = scratch / "report.json"
    return reported(read, report, error_report(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
