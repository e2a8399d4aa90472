"""Progress of a sweep on standard error: how many runs are made, what is being made, and the time left."""

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from meshscope.report.plain import plain
from meshscope.sweep.planned import Command, Planned
from meshscope.sweep.work import Ending, time_left_s

MAX_TOLD = 60  # characters of what a command says, behind its bar


class SweepProgress:
    """A bar for the sweep and a line a run on a terminal, a line a finished run elsewhere."""

    def __init__(self, planned: Iterable[Planned], *, n_jobs: int) -> None:
        self._waiting = {one.name: one.command for one in planned}
        self._n_all, self._n_jobs, self._n_failed = len(self._waiting), n_jobs, 0
        self._took: list[tuple[Command, float]] = []
        self._began_s = time.monotonic()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Starts the display."""
        if sys.stderr.isatty():
            console = Console(stderr=True, markup=False, highlight=False)
            text = TextColumn("{task.description}", markup=False)
            self._bars = Bars(
                SpinnerColumn(), text, BarColumn(20), TimeElapsedColumn(), console=console
            )
            self._bars.start()
            self._tasks[""] = self._bars.add_task(self._summary(), total=self._n_all)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the display; its last state stays on the screen."""
        if self._bars is not None:
            self._bars.stop()

    def started(self, planned: Planned) -> None:
        """A run is being made."""
        if self._bars is not None:
            self._tasks[planned.name] = self._bars.add_task(f"  {planned}", total=None)

    def said(self, planned: Planned, words: str) -> None:
        """The last thing that the command said."""
        if self._bars is not None and words:
            told = f"  {planned}: {plain(words)[:MAX_TOLD]}"
            self._bars.update(self._tasks[planned.name], description=told)

    def ended(self, planned: Planned, how: Ending, seconds: float) -> None:
        """A run is made, or could not be."""
        del self._waiting[planned.name]
        self._n_failed += how is Ending.FAILED
        if how is Ending.DONE:
            self._took.append((planned.command, seconds))
        if self._bars is None:
            elapsed_s = time.monotonic() - self._began_s
            words = f"{planned}: {how} in {seconds:.1f} s; {self._summary()}"
            sys.stderr.write(f"[{elapsed_s:6.1f} s] {words}\n")
            sys.stderr.flush()
            return
        self._bars.remove_task(self._tasks.pop(planned.name))
        n_made = self._n_all - len(self._waiting)
        self._bars.update(self._tasks[""], completed=n_made, description=self._summary())

    def _summary(self) -> str:
        n_made = self._n_all - len(self._waiting)
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        left_s = time_left_s(self._took, list(self._waiting.values()), n_jobs=self._n_jobs)
        left = f", about {format_left(left_s)} left" if left_s else ""
        return f"{n_made} of {self._n_all}{failed}{left}"


def format_left(seconds: float) -> str:
    """A rough time for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
