"""Processes that compile one program after the other, as starting JAX and its compiler takes longer than compiling a small one."""

import os
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pytest

from meshscope import workers
from meshscope.workers import Worker

OF_A_TEST = {"PYTEST_CURRENT_TEST", "MESHSCOPE_CACHE"}  # no worker reads them
COMPILER = workers.MAIN


class Processes:
    """Workers that wait for their next program, by what they were started with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free = defaultdict[object, list[Worker]](list)

    def worker(
        self, work: str, folder: Path, *, python: str, environment: Mapping[str, str] | None
    ) -> AbstractContextManager[Worker]:
        """A free worker, or a new one, that is free again unless its block fails."""
        options = {"python": python, "environment": environment}
        if workers.MAIN != COMPILER:  # a stand-in, which may end after its first program
            return Worker(work, folder, **options)
        variables = os.environ if environment is None else environment
        read = frozenset((k, v) for k, v in variables.items() if k not in OF_A_TEST)
        free = self._free[work, python, read]
        if not free:
            free.append(Worker(work, Path(mkdtemp(dir=self._folder)), **options))
        return self._lent(free, free.pop())

    @contextmanager
    def _lent(self, free: list[Worker], worker: Worker) -> Generator[Worker]:
        try:
            yield worker
        except BaseException:
            worker.close()
            raise
        if len(free) < 2:  # one for each phase
            free.append(worker)
        else:
            worker.close()

    def close(self) -> None:
        for free in self._free.values():
            for worker in free:
                worker.close()


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Generator[Processes]:
    made = Processes(tmp_path_factory.mktemp("workers"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _kept_workers(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshscope.backends.compile.compile.Worker", processes.worker)
