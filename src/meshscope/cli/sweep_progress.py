"""Progress of a sweep on standard error: how many runs are made, what is being made, and the time left."""

from collections.abc import Iterable
from typing import Self

from rich.progress import BarColumn, SpinnerColumn, TaskID, TimeElapsedColumn

from meshscope.cli.display import Display, left_words, words_column
from meshscope.sweep.planned import PlannedRun, RunCommand
from meshscope.sweep.work import Outcome, time_left_s
from meshscope.views.plain import plain

MAX_TOLD = 60  # characters of what a command says, behind its bar


class SweepProgress(Display):
    """A bar for the sweep and a line a run on a terminal, a line a finished run elsewhere."""

    def __init__(self, planned: Iterable[PlannedRun], *, n_jobs: int) -> None:
        super().__init__(SpinnerColumn(), words_column(), BarColumn(20), TimeElapsedColumn())
        self._waiting = {one.name: one.command for one in planned}
        self._n_all, self._n_jobs, self._n_failed = len(self._waiting), n_jobs, 0
        self._took: list[tuple[RunCommand, float]] = []
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Starts the display, with a bar for all."""
        super().__enter__()
        if self.bars is not None:
            self._tasks[""] = self.bars.add_task(self._summary(), total=self._n_all)
        return self

    def started(self, planned: PlannedRun) -> None:
        """A run is being made."""
        if self.bars is not None:
            self._tasks[planned.name] = self.bars.add_task(f"  {planned}", total=None)

    def said(self, planned: PlannedRun, words: str) -> None:
        """The last thing that the command said."""
        if self.bars is not None and words:
            told = f"  {planned}: {plain(words)[:MAX_TOLD]}"
            self.bars.update(self._tasks[planned.name], description=told)

    def ended(self, planned: PlannedRun, how: Outcome, seconds: float) -> None:
        """A run is made, or could not be."""
        del self._waiting[planned.name]
        self._n_failed += how is Outcome.FAILED
        if how is Outcome.DONE:
            self._took.append((planned.command, seconds))
        if self.bars is None:
            self.write(f"{planned}: {how} in {seconds:.1f} s; {self._summary()}")
            return
        self.bars.remove_task(self._tasks.pop(planned.name))
        n_made = self._n_all - len(self._waiting)
        self.bars.update(self._tasks[""], completed=n_made, description=self._summary())

    def _summary(self) -> str:
        n_made = self._n_all - len(self._waiting)
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        left_s = time_left_s(self._took, list(self._waiting.values()), n_jobs=self._n_jobs)
        left = f", {left_words(left_s)}" if left_s else ""
        return f"{n_made} of {self._n_all}{failed}{left}"
