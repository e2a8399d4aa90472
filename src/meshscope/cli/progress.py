"""Progress of one command on standard error: what each part of the work does, and the time left where known."""

import time
from collections.abc import Mapping

from rich.progress import SpinnerColumn, TaskID, TimeElapsedColumn

from meshscope.cli.display import Display, LeftColumn, left_words, words_column

DONE = "done"


class CompileProgress(Display):
    """Called with a part of the work, what happens to it, and the seconds that it has left where known.

    `expected_s` is what each part is thought to take in all, where something tells; `told_by` is what.
    """

    def __init__(
        self, expected_s: Mapping[str, float] | None = None, *, told_by: str | None = None
    ) -> None:
        super().__init__(SpinnerColumn(), words_column(), TimeElapsedColumn(), LeftColumn())
        self._expected_s = dict(expected_s or {})
        self._told_by = f", as {told_by} took" if told_by else ""
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, step: str, left_s: float | None = None) -> None:
        """Says what happens now."""
        if left_s is None and what in self._expected_s:
            left_s = self._expected_s.pop(what)
            step = f"{step}{self._told_by}"
        if self.bars is None:
            left = "" if left_s is None else f", {left_words(left_s)}"
            self.write(f"{what}: {step}{left}")
            return
        description = f"{what:8} {step}"
        if what not in self._tasks:
            self._tasks[what] = self.bars.add_task(description, total=1)
        done = 1 if step == DONE else 0
        self.bars.update(self._tasks[what], description=description, completed=done)
        if left_s is not None:
            self.bars.update(self._tasks[what], ends_s=time.monotonic() + left_s)
