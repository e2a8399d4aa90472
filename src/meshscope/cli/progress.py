"""Progress on standard error: a row for each part of the work on a terminal, plain lines elsewhere."""

import time

from rich.progress import SpinnerColumn, TaskID, TimeElapsedColumn

from meshscope.cli.display import Display, TimeLeftColumn, text_column, time_left_text

DONE = "done"


class WorkProgress(Display):
    """A progress callback of the API that shows each part of the work."""

    def __init__(self) -> None:
        super().__init__(SpinnerColumn(), text_column(), TimeElapsedColumn(), TimeLeftColumn())
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, part: str, step: str, left_s: float | None = None) -> None:
        """Shows the step; `left_s` are the seconds that the part still needs, if known."""
        if self.bars is None:
            left = "" if left_s is None else f", {time_left_text(left_s)}"
            self.write(f"{part}: {step}{left}")
            return
        description = f"{part:8} {step}"
        if part not in self._tasks:
            self._tasks[part] = self.bars.add_task(description, total=1)
        done = 1 if step == DONE else 0
        self.bars.update(self._tasks[part], description=description, completed=done)
        if left_s is not None:
            self.bars.update(self._tasks[part], ends_s=time.monotonic() + left_s)
