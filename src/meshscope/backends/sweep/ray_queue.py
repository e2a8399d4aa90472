"""Executes the commands of a sweep as tasks of a Ray cluster, which restarts tasks of a lost node."""

import io
import logging
import os
import signal
import socket
import sys
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import meshscope
from meshscope.backends.sweep import queue
from meshscope.backends.sweep.folder import PlannedRun, SweepFolder
from meshscope.backends.sweep.queue import (
    LOG_BYTES,
    CommandQueue,
    EndedCommand,
    n_cores,
    started_child,
)
from meshscope.errors import MeshscopeError, MissingToolError, RunError
from meshscope.store.folder import new_folder
from meshscope.workers import MAX_MESSAGE

CONNECT_S = 5.0
N_RETRIES = 3  # of a command whose worker process or node was lost


class RayQueue(CommandQueue):
    """Tasks on the nodes of a cluster; their runs travel back and are written by this process.

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
        words = (*queue.CHILD, planned.command.value, *planned.words)
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
        """Cancels the tasks that still run, and leaves the cluster."""
        try:
            super().close()
        finally:
            self._ray.shutdown()
            self._redirected.close()

    def _n_cpus(self, planned: PlannedRun) -> int:
        """The CPUs of a task: its command's, at most the largest node's."""
        nodes = (node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"])
        return max(1, min(n_cores(planned.command), int(max(nodes, default=1))))


def _connected_ray(address: str | None) -> Any:
    """The module, connected to a cluster; MissingToolError without Ray, RunError without the cluster."""
    try:
        import ray  # noqa: PLC0415  only this engine needs it
    except ImportError as error:
        raise MissingToolError(
            "--queue ray needs Ray, which is not installed. "
            "Install the extra in your clone: pip install -e '.[ray]'."
        ) from error
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
        with started_child([*words, "--out", str(out)], log, folder=folder) as child:
            returncode = child.wait()
        text = log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
        content = io.BytesIO()
        if returncode == 0:
            with zipfile.ZipFile(content, mode="w") as stored:
                for path in sorted(out.rglob("*")):
                    stored.write(path, path.relative_to(out))
        archive = content.getvalue() or None
        return EndedCommand(returncode=returncode, log=text), archive
