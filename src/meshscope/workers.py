"""Worker processes: one loop for requests, progress and results, and failures as one error message.

A worker owns a compiler, devices or a share of a search, so that a crash becomes a message. It answers
requests on its standard input until that closes, as it does when the parent ends.
"""

import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any, Self

from meshscope.errors import CompileError, MeshscopeError, ParseError, RunFailedError, SpecError

MAIN = ("-m", "meshscope.workers")
PREFIX = b"meshscope: "  # of the worker's lines for its parent; libraries write others
# Exit codes of a process interrupted by Ctrl-C or SIGTERM: by the signal, or as shells and Python pass it on.
INTERRUPTED = [s for n in (signal.SIGINT, signal.SIGTERM) for s in (-n, 128 + n)]
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
MAX_MESSAGE = 2000  # characters of a worker's own message
MAX_LINE = 300
_TELLING = re.compile(r"Check failed|^\*\*\* |^F\d{4} |Error|emory")


@contextmanager
def signals_handled(handlers: Mapping[Any, Any]) -> Generator[None]:
    """Handles signals by these functions, SIG_IGN or SIG_DFL while the block runs."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Called with a part of the work, its present step, and the seconds that it still needs, if known.
Progress = Callable[[str, str, float | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What a worker process does, in the words of its error messages.

    `process` and `activity` fill "PROCESS crashed while ACTIVITY"; `rejection` introduces the
    message of a library that raised.
    """

    process: str
    activity: str
    rejection: str
    memory_remedy: str
    crash_remedy: str
    error: type[CompileError] | type[RunFailedError]

    def reported(self, report: Mapping[str, Any]) -> MeshscopeError:
        """The error of an exception in the worker; OSError if it had no space to write."""
        if report["errno"] in NO_SPACE:
            raise OSError(report["errno"], os.strerror(report["errno"]))
        kind, message = report["type"], report["message"][:MAX_MESSAGE]
        if report["is_ours"]:
            return (ParseError if kind == ParseError.__name__ else SpecError)(message)
        return self.error(f"{self.rejection}: {kind}: {message}")

    def ended(self, returncode: int, log: str) -> MeshscopeError:
        """The error of a worker that ended without an answer."""
        status = exit_status(returncode)
        if was_killed(returncode):
            reason = (
                f"was killed while {self.activity}, probably because the machine ran out of memory. "
                f"{self.memory_remedy}"
            )
        elif returncode in INTERRUPTED:
            reason = f"was interrupted ({status}) while {self.activity}. Run the command again."
        else:
            reason = (
                f"crashed ({status}) while {self.activity}. {self.crash_remedy} Last line of its log: "
                f"{telling_line(log)}"
            )
        return self.error(f"{self.process} {reason}")


def n_available_cores() -> int:
    """The cores that this process may use; on macOS and Windows, all of them."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def was_killed(returncode: int) -> bool:
    """Whether the process got SIGKILL, which Linux sends when memory runs out."""
    return returncode == -signal.SIGKILL


def exit_status(returncode: int) -> str:
    """The name of the signal, or the exit code, of a `subprocess.Popen.returncode`."""
    return signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"


def telling_line(log: str) -> str:
    """The first line of the log that reports a failure, or else its last line."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or ["none"])[0 if telling else -1][:MAX_LINE]


class Worker:
    """A process that does `work`, a function MODULE:FUNCTION of JSON values, request after request.

    Its standard error goes to the file `log` in `folder`. It is killed when the block ends.
    """

    def __init__(
        self,
        work: str,
        folder: Path,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, *MAIN, work],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def do(
        self, request: Any, task: WorkerTask, *, part: str = "", progress: Progress | None = None
    ) -> Any:
        """The result of a request; raises the failure of the worker as one error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{json.dumps(request)}\n".encode())
            self.process.stdin.flush()
        for line in self.process.stdout:
            if not line.startswith(PREFIX):
                continue
            answer = json.loads(line.removeprefix(PREFIX))
            if "result" in answer:
                return answer["result"]
            if "error" in answer:
                raise task.reported(answer["error"])
            if progress is not None:
                progress(part, answer["step"], answer["left_s"])
        returncode = self.process.wait()
        raise task.ended(returncode, self._log.read_text(encoding="utf-8", errors="replace"))

    def close(self) -> None:
        """Ends the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a request that it did not read
                    pipe.close()


def run_worker(  # noqa: PLR0913  what a process has, and who hears of it
    work: str,
    request: Mapping[str, Any],
    folder: Path,
    task: WorkerTask,
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    part: str = "",
    progress: Progress | None = None,
) -> Any:
    """The result of one request to a worker of its own, with its log in `folder`."""
    with Worker(work, folder, python=python, environment=environment) as worker:
        result = worker.do(request, task, part=part, progress=progress)
        assert worker.process.stdin is not None
        worker.process.stdin.close()  # it ends by itself
        worker.process.wait()
    return result


# Inside a worker process.


def serve(work: str) -> None:
    """Answers requests until standard input closes; ends the process if that happens during work."""
    gc.set_threshold(100_000)  # as in the command line: most of what work allocates is kept
    requests = SimpleQueue[bytes | None]()
    is_idle = threading.Event()

    def read() -> None:
        rest = b""
        while piece := os.read(sys.stdin.fileno(), 1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                is_idle.clear()
                requests.put(line)
        if requests.qsize() or not is_idle.is_set():
            os._exit(1)
        requests.put(None)

    is_idle.set()
    threading.Thread(target=read, daemon=True).start()
    while (request := requests.get()) is not None:
        try:
            answer = json.dumps({"result": resolve_name(work)(json.loads(request))})
        except Exception as error:  # noqa: BLE001  the parent writes the message
            report = {
                "type": type(error).__name__,
                "message": str(error),
                "is_ours": isinstance(error, MeshscopeError),
                "errno": error.errno if isinstance(error, OSError) else None,
            }
            answer = json.dumps({"error": report})
        is_idle.set()
        _write(answer)


def report_progress(step: str, left_s: float | None = None) -> None:
    """Reports a step to the parent, and the seconds that the whole work still needs."""
    _write(json.dumps({"step": step, "left_s": left_s}))


def _write(answer: str) -> None:
    """Writes a separate line, even if a library left one unfinished."""
    sys.stdout.write(f"\n{PREFIX.decode()}{answer}\n")
    sys.stdout.flush()


def end_with_parent(*, grace_s: float = 0.0) -> None:
    """Ends this process when its parent ends, which closes standard input.

    With `grace_s` the process gets SIGTERM first, to remove half-written files; after that many
    seconds it is ended by force.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        if grace_s > 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    serve(sys.argv[1])
