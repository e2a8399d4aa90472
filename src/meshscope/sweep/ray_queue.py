"""Executes the commands of a sweep as tasks of a Ray cluster, which restarts those of a lost node."""

import io
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import meshscope
from meshscope.errors import MeshscopeError, MissingToolError, RunError
from meshscope.store.folder import new_folder
from meshscope.sweep import queue
from meshscope.sweep.folder import SweepFolder
from meshscope.sweep.planned import PlannedRun
from meshscope.sweep.queue import LOG_BYTES, EndedCommand, n_cores
from meshscope.workers import MAX_MESSAGE

CONNECT_S = 5.0
N_RETRIES = 3  # of a command whose worker process or node was lost


class RayQueue:
    """Tasks on the nodes of a cluster; their runs travel back and are written by this process.

    `address` is that of a cluster. Without one it is RAY_ADDRESS, else a cluster that runs on this
    machine, else one that starts here and ends with the sweep. The nodes share no file system.
    """

    def __init__(self, folder: SweepFolder, *, force: bool, address: str | None = None) -> None:
        self._folder, self._force = folder, force
        self._ray = _connected_ray(address)
        self._redirected = ExitStack()  # Ray reports lost nodes on standard output
        self._redirected.enter_context(redirect_stdout(sys.stderr))
        self._running: dict[Any, tuple[PlannedRun, float]] = {}

    def n_jobs(self, planned: Sequence[PlannedRun]) -> int:
        """As many as keep all CPUs of the cluster busy."""
        n_cpus = int(self._ray.cluster_resources().get("CPU", 0))
        return max(1, n_cpus // max(self._n_cpus(one) for one in planned))

    def start(self, planned: PlannedRun) -> None:
        """Submits the task that makes the run."""
        command = RemoteCommand(
            name=planned.name,
            arguments=(*queue.CHILD, planned.command.value, *planned.words),
            folder=Path.cwd(),
            version=meshscope.__version__,
        )
        options = {"num_cpus": self._n_cpus(planned), "max_retries": N_RETRIES}
        task = self._ray.remote(remote_end).options(**options, name=planned.name)
        self._running[task.remote(command)] = planned, time.monotonic()

    def ended(self) -> list[EndedCommand]:
        """The tasks that ended since the last call; their runs are written."""
        if not self._running:
            return []
        tasks, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        return [self._ended(task) for task in tasks]

    def last_lines(self) -> list[tuple[PlannedRun, str]]:
        """Nothing: logs stay on the nodes until the commands end."""
        return []

    def close(self) -> None:
        """Cancels the tasks that still run, and leaves the cluster."""
        for task in self._running:
            self._ray.cancel(task)
        if self._running:
            n = len(self._running)
            self._ray.wait(list(self._running), num_returns=n, timeout=queue.WAIT_FOR_END_S)
        self._ray.shutdown()
        self._redirected.close()

    def _n_cpus(self, planned: PlannedRun) -> int:
        """The CPUs of a task: those of its command, if a node has as many."""
        nodes = (node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"])
        return max(1, min(n_cores(planned.command), int(max(nodes, default=1))))

    def _ended(self, task: Any) -> EndedCommand:
        planned, started_s = self._running.pop(task)
        try:
            end: RemoteEnd = self._ray.get(task)
            if end.archive is not None:
                unpack(end.archive, self._folder.path / planned.name, force=self._force)
        except (self._ray.exceptions.RayError, MeshscopeError) as error:
            seconds = time.monotonic() - started_s
            return EndedCommand(
                planned=planned, returncode=1, log="", seconds=seconds, failure=_reason(error)
            )
        return EndedCommand(
            planned=planned, returncode=end.returncode, log=end.log, seconds=end.seconds
        )


def _connected_ray(address: str | None) -> Any:
    """The module, connected to a cluster; MissingToolError without Ray, RunError without the cluster."""
    try:
        import ray  # noqa: PLC0415  only this engine needs it
    except ImportError as error:
        raise MissingToolError(
            "--queue ray needs Ray, which is not installed. "
            "Install the extra in your clone: pip install -e '.[ray]'."
        ) from error
    if address is not None:
        _check_listens(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a sweep sends nothing to others
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:MAX_MESSAGE]
        raise RunError(f"--queue ray: {reason} Check --address and RAY_ADDRESS.") from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray replaces it
    return ray


def _check_listens(address: str) -> None:
    """RunError unless something listens at HOST:PORT; Ray itself waits for minutes."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        raise RunError(
            f"no Ray cluster listens at '{address}': {error}. "
            "Give HOST:PORT as 'ray start' prints it, or leave --address out."
        ) from error


def _reason(error: Exception) -> str:
    """Why there is no run: our own message, or the last line of Ray's."""
    cause = getattr(error, "cause", None) or error  # what the task raised on its node
    if isinstance(cause, MeshscopeError):
        return str(cause)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"the Ray task failed ({type(cause).__name__}): {lines[-1] if lines else 'no message'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCommand:
    """The arguments of Python that make the run `name`, where they are executed, and by which version."""

    name: str
    arguments: tuple[str, ...]
    folder: Path
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEnd:
    """How a command ended on its node; `archive` is the run folder as a zip file, if it was made."""

    returncode: int
    log: str
    seconds: float
    archive: bytes | None


def remote_end(command: RemoteCommand) -> RemoteEnd:
    """Executes the command in a child that ends with this process; RunError on another version."""
    if meshscope.__version__ != command.version:
        raise RunError(
            f"the node has meshscope {meshscope.__version__}, the sweep has {command.version}. "
            "Install one version on every node."
        )
    started_s = time.monotonic()
    with TemporaryDirectory(prefix="meshscope-sweep-") as temporary:
        out, log = Path(temporary, command.name), Path(temporary, "log")
        arguments = [*command.arguments, "--out", str(out)]
        folder = command.folder if command.folder.is_dir() else None
        with (
            log.open("wb") as written,
            subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,  # the child ends when it closes
                stdout=written,
                stderr=written,
                cwd=folder,
            ) as child,
        ):
            returncode = child.wait()
        return RemoteEnd(
            returncode=returncode,
            log=log.read_bytes()[-LOG_BYTES:].decode(errors="replace"),
            seconds=time.monotonic() - started_s,
            archive=_archive(out) if returncode == 0 else None,
        )


def unpack(archive: bytes, path: Path, *, force: bool) -> None:
    """Writes the run folder to `path`, whole or not at all."""
    with (
        new_folder(path, force=force) as partial,
        zipfile.ZipFile(io.BytesIO(archive)) as stored,
    ):
        stored.extractall(partial)  # names stay inside of the folder


def _archive(folder: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, mode="w") as stored:
        for path in sorted(folder.rglob("*")):
            stored.write(path, path.relative_to(folder))
    return content.getvalue()
