"""Makes the runs of a sweep, each by a command in its own process: on this machine, a Ray cluster or TPU slices."""

import io
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import meshscope
from meshscope.backends.sweep.folder import PlannedRun, RunCommand, RunState, SweepFolder
from meshscope.errors import MeshscopeError, MissingToolError, RunError
from meshscope.store.folder import new_folder
from meshscope.workers import (
    INTERRUPTED,
    MAX_MESSAGE,
    Progress,
    exit_status,
    n_available_cores,
    telling_line,
    was_killed,
)

# The command line as a child: without its parent it ends as by SIGTERM, so that half-written folders are
# removed, and by force after some seconds.
_PROGRAM = (
    "import runpy; from meshscope.workers import end_with_parent; end_with_parent(grace_s=15.0); "
    "runpy.run_module('meshscope', run_name='__main__', alter_sys=True)"
)
CHILD = ("-c", _PROGRAM)
LOG_BYTES = 65_536  # read from the end of a command's log
POLL_S, END_POLL_S = 0.02, 0.2
SWEEP = "sweep"  # subject of progress reports
WAIT_FOR_END_S = 20.0  # for terminated commands to remove their half-written runs
MESSAGE = "meshscope: "  # prefix of the message of a failed command
CONNECT_S = 5.0
N_RETRIES = 3  # of a command whose worker process or node was lost


class Queue(StrEnum):
    """Where the commands of a sweep are executed."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedCommand:
    """How the command of a run ended, and the end of its log.

    `failure` is the message if the command has no exit code, because its machine was lost.
    """

    returncode: int
    log: str = ""
    failure: str | None = None


class CommandQueue:
    """Executes commands; a complete run is in the folder of the sweep."""

    def __init__(self, folder: SweepFolder, *, force: bool) -> None:
        self.folder, self.force = folder, force
        self.is_ending = threading.Event()

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """How many of these commands it executes at a time, if the user does not say."""
        raise NotImplementedError

    def made(self, planned: PlannedRun) -> EndedCommand:
        """Executes the command that makes the run, to its end; called in a thread for each command."""
        raise NotImplementedError

    def end_commands(self, *, kill: bool) -> None:
        """Terminates, or kills, the commands that still run."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the machines, after all commands ended."""


def make_runs(
    planned: Sequence[PlannedRun], queue: CommandQueue, *, n_jobs: int, progress: Progress
) -> None:
    """Makes the runs in order, up to `n_jobs` in parallel; failures are stored and do not stop others.

    A run on live devices has the machine to itself, because others would change its times. Reports each end.
    """
    waiting, ended = deque(planned), list[tuple[RunCommand, RunState, float]]()
    running: dict[Future[EndedCommand], tuple[PlannedRun, float]] = {}
    progress(SWEEP, f"0 of {len(planned)}", None)
    with ExitStack() as closing:
        closing.callback(queue.close)
        pool = closing.enter_context(ThreadPoolExecutor(n_jobs))
        closing.callback(_end, queue, running)
        while waiting or running:
            while waiting and _has_room(waiting[0], [one for one, _ in running.values()], n_jobs):
                one = waiting.popleft()
                running[pool.submit(queue.made, one)] = one, time.monotonic()
            time.sleep(POLL_S)
            for future in [future for future in running if future.done()]:
                one, began_s = running.pop(future)
                seconds = time.monotonic() - began_s
                state = _state(one, future.result(), queue.folder)
                ended.append((one.command, state, seconds))
                n_failed = sum(state is RunState.FAILED for _, state, _ in ended)
                failed = f", {n_failed} failed" if n_failed else ""
                done = [(command, s) for command, state, s in ended if state is RunState.DONE]
                left = [one.command for one in (*waiting, *(one for one, _ in running.values()))]
                progress(
                    SWEEP,
                    f"{one}: {state} in {seconds:.1f} s; {len(ended)} of {len(planned)}{failed}",
                    time_left_s(done, left, n_jobs=n_jobs) if left else None,
                )


def _end(queue: CommandQueue, running: Iterable[Future[EndedCommand]]) -> None:
    """Ends the commands that still run, without a half-written run."""
    queue.is_ending.set()
    last = time.monotonic() + WAIT_FOR_END_S
    try:
        while not all(one.done() for one in running):
            queue.end_commands(kill=time.monotonic() > last)
            time.sleep(END_POLL_S)
    finally:
        queue.end_commands(kill=True)


def _has_room(planned: PlannedRun, running: Sequence[PlannedRun], n_jobs: int) -> bool:
    is_live = RunCommand.RUN in {planned.command, *(one.command for one in running[:1])}
    return not running or (not is_live and len(running) < n_jobs)


def _state(planned: PlannedRun, end: EndedCommand, folder: SweepFolder) -> RunState:
    """How the command ended; stores a failure in the folder, with the command's message or a line of its log."""
    if end.returncode in INTERRUPTED:
        return RunState.INTERRUPTED
    if not end.returncode:
        return RunState.DONE
    lines = end.log.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(MESSAGE)]
    message = f"the command crashed ({exit_status(end.returncode)}). Its log says: {telling_line(end.log)}"
    if end.failure is not None:
        message = end.failure
    elif was_killed(end.returncode):
        message = "the command was killed; the machine probably ran out of memory."
    elif starts:
        message = "\n".join(lines[starts[-1] :]).removeprefix(MESSAGE)[:MAX_MESSAGE]
    folder.set_failure(planned, message)
    return RunState.FAILED


def time_left_s(
    durations: Sequence[tuple[RunCommand, float]], waiting: Sequence[RunCommand], *, n_jobs: int
) -> float | None:
    """Seconds until the waiting runs are made, from the mean duration of each command; None if none is known.

    A command without a duration counts as the mean of all. Live runs run one by one.
    """
    if not durations:
        return None
    total = 0.0
    for command in waiting:
        same = [seconds for made, seconds in durations if made is command]
        seconds = same or [s for _, s in durations]
        total += sum(seconds) / len(seconds) / (1 if command is RunCommand.RUN else n_jobs)
    return total


# The cores that a command keeps busy: `compile` has a worker process for each phase.
N_CORES = {RunCommand.PREDICT: 1, RunCommand.COMPILE: 2, RunCommand.RUN: 1}


def _started_child(
    words: Sequence[str], log: Path, *, folder: Path | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Python with these arguments, which writes into the log and ends when this process does."""
    with log.open("wb") as written:
        return subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=written,
            cwd=folder,
            pass_fds=pass_fds,
        )


class LocalQueue(CommandQueue):
    """Child processes, which inherit the lock of the folder and end when this process ends."""

    def __init__(self, folder: SweepFolder, *, force: bool) -> None:
        super().__init__(folder, force=force)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """As many as keep all cores of this process busy."""
        return max(1, n_available_cores() // max(N_CORES[one.command] for one in planned))

    def made(self, planned: PlannedRun) -> EndedCommand:
        """Runs the command as a child, whose log is removed when it has ended."""
        if self.is_ending.is_set():
            return EndedCommand(returncode=-signal.SIGTERM)
        log, out = self.folder.path / f".{planned.name}.log", str(self.folder.path / planned.name)
        words = [*CHILD, planned.command.value, *planned.words, "--out", out]
        locks = () if self.folder.lock is None else (self.folder.lock,)
        with _started_child([*words, *["--force"] * self.force], log, pass_fds=locks) as child:
            self._children[planned.name] = child
            returncode = child.wait()
            del self._children[planned.name]
        text = _tail(log)
        log.unlink()
        return EndedCommand(returncode=returncode, log=text)

    def end_commands(self, *, kill: bool) -> None:
        """Sends SIGTERM or SIGKILL to the children."""
        for child in list(self._children.values()):
            child.send_signal(signal.SIGKILL if kill else signal.SIGTERM)


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")


class RayQueue(CommandQueue):
    """Tasks on the nodes of a cluster, restarted if a node is lost; this process writes their runs.

    The `address` of the cluster defaults to RAY_ADDRESS, else a cluster that runs on this machine, else
    one that starts here and ends with the sweep. The nodes share no file system.
    """

    def __init__(self, folder: SweepFolder, *, force: bool, address: str | None = None) -> None:
        super().__init__(folder, force=force)
        self._ray = _connected_ray(address)
        self._redirected = ExitStack()  # Ray reports lost nodes on standard output
        self._redirected.enter_context(redirect_stdout(sys.stderr))
        self._tasks: set[Any] = set()

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """As many as keep all CPUs of the cluster busy."""
        n_cpus = int(self._ray.cluster_resources().get("CPU", 0))
        return max(1, n_cpus // max(self._n_cpus(one) for one in planned))

    def made(self, planned: PlannedRun) -> EndedCommand:
        """Waits for a task that makes the run, and writes it."""
        words = (*CHILD, planned.command.value, *planned.words)
        options = {"num_cpus": self._n_cpus(planned), "max_retries": N_RETRIES}
        remote = self._ray.remote(remote_end).options(**options, name=planned.name)
        task = remote.remote(planned.name, words, Path.cwd(), meshscope.__version__)
        self._tasks.add(task)
        try:
            end, archive = self._ray.get(task)
            if archive is not None:
                with (
                    new_folder(self.folder.path / planned.name, force=self.force) as partial,
                    zipfile.ZipFile(io.BytesIO(archive)) as stored,
                ):
                    stored.extractall(partial)  # names stay inside of the folder
        except (self._ray.exceptions.RayError, MeshscopeError) as error:
            cause = getattr(error, "cause", None) or error  # what the task raised on its node
            if isinstance(cause, MeshscopeError):
                return EndedCommand(returncode=1, failure=str(cause))
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            reason = f"({type(cause).__name__}): {lines[-1] if lines else 'no message'}"
            return EndedCommand(returncode=1, failure=f"the Ray task failed {reason}")
        finally:
            self._tasks.discard(task)
        return end

    def end_commands(self, *, kill: bool) -> None:
        """Cancels the tasks."""
        for task in tuple(self._tasks):
            self._ray.cancel(task, force=kill)

    def close(self) -> None:
        """Leaves the cluster."""
        self._ray.shutdown()
        self._redirected.close()

    def _n_cpus(self, planned: PlannedRun) -> int:
        """The CPUs of a task: its command's, at most the largest node's."""
        nodes = (node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"])
        return max(1, min(N_CORES[planned.command], int(max(nodes, default=1))))


def _connected_ray(address: str | None) -> Any:
    """The module, connected to a cluster; MissingToolError without Ray, RunError without the cluster."""
    try:
        import ray  # noqa: PLC0415  only this queue needs it
    except ImportError as error:
        needed = "--queue ray needs Ray, which is not installed"
        raise MissingToolError.of_extra(needed, "ray") from error
    if address is not None:  # Ray itself waits for minutes
        host, _, port = address.rpartition("//")[2].rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise RunError(
                f"no Ray cluster listens at '{address}': {error}. "
                "Give HOST:PORT as 'ray start' prints it, or leave --address out."
            ) from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a sweep sends nothing to others
    on_sigterm, quiet = signal.getsignal(signal.SIGTERM), logging.ERROR
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:MAX_MESSAGE]
        raise RunError(f"--queue ray: {reason} Check --address and RAY_ADDRESS.") from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray replaces it
    return ray


def remote_end(
    name: str, words: Sequence[str], home: Path, version: str
) -> tuple[EndedCommand, bytes | None]:
    """How a command ended on its node, in `home` if the node has it, and its run folder as a zip file.

    The child ends with this process. RunError on another version of meshscope.
    """
    if meshscope.__version__ != version:
        raise RunError(
            f"the node has meshscope {meshscope.__version__}, the sweep has {version}. "
            "Install one version on every node."
        )
    with TemporaryDirectory(prefix="meshscope-sweep-") as temporary:
        out, log = Path(temporary, name), Path(temporary, "log")
        folder = home if home.is_dir() else None
        with _started_child([*words, "--out", str(out)], log, folder=folder) as child:
            returncode = child.wait()
        content = io.BytesIO()
        if returncode == 0:
            with zipfile.ZipFile(content, mode="w") as stored:
                for path in sorted(out.rglob("*")):
                    stored.write(path, path.relative_to(out))
        return EndedCommand(returncode=returncode, log=_tail(log)), content.getvalue() or None
