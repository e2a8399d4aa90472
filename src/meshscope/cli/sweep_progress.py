"""Progress of a sweep on standard error: runs made, runs in progress, and the time left."""

from collections.abc import Iterable
from typing import Self

from rich.progress import BarColumn, SpinnerColumn, TaskID, TimeElapsedColumn

from meshscope.cli.display import Display, text_column, time_left_text
from meshscope.reports.plain import plain
from meshscope.sweep.planned import PlannedRun, RunCommand
from meshscope.sweep.work import Outcome, time_left_s

MAX_MESSAGE = 60  # characters of a command's last line, behind its bar


class SweepProgress(Display):
    """On a terminal a bar for the sweep and a row for each run; elsewhere a line for each finished run."""

    def __init__(self, planned: Iterable[PlannedRun], *, n_jobs: int) -> None:
        super().__init__(SpinnerColumn(), text_column(), BarColumn(20), TimeElapsedColumn())
        self._waiting = {one.name: one.command for one in planned}
        self._n_all, self._n_jobs, self._n_failed = len(self._waiting), n_jobs, 0
        self._durations: list[tuple[RunCommand, float]] = []
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Starts the display with the bar of the sweep."""
        super().__enter__()
        if self.bars is not None:
            self._tasks[""] = self.bars.add_task(self._summary(), total=self._n_all)
        return self

    def started(self, planned: PlannedRun) -> None:
        """A run starts."""
        if self.bars is not None:
            self._tasks[planned.name] = self.bars.add_task(f"  {planned}", total=None)

    def reported(self, planned: PlannedRun, message: str) -> None:
        """The last line that the command wrote."""
        if self.bars is not None and message:
            description = f"  {planned}: {plain(message)[:MAX_MESSAGE]}"
            self.bars.update(self._tasks[planned.name], description=description)

    def ended(self, planned: PlannedRun, outcome: Outcome, seconds: float) -> None:
        """A run ended, after `seconds`."""
        del self._waiting[planned.name]
        self._n_failed += outcome is Outcome.FAILED
        if outcome is Outcome.DONE:
            self._durations.append((planned.command, seconds))
        if self.bars is None:
            self.write(f"{planned}: {outcome} in {seconds:.1f} s; {self._summary()}")
            return
        self.bars.remove_task(self._tasks.pop(planned.name))
        n_ended = self._n_all - len(self._waiting)
        self.bars.update(self._tasks[""], completed=n_ended, description=self._summary())

    def _summary(self) -> str:
        n_ended = self._n_all - len(self._waiting)
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        left_s = time_left_s(self._durations, list(self._waiting.values()), n_jobs=self._n_jobs)
        left = f", {time_left_text(left_s)}" if left_s else ""
        return f"{n_ended} of {self._n_all}{failed}{left}"
