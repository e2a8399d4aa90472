"""Progress on standard error: a line a phase that lives on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

DONE = "done"


class Progress:
    """Called with a phase and what happens to it; use it as a context manager."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Starts the display."""
        if sys.stderr.isatty():
            console = Console(stderr=True, markup=False, highlight=False)
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bars = Bars(*columns, console=console)
            self._bars.start()
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

    def __call__(self, phase: str, step: str) -> None:
        """Says what happens to the phase now."""
        if self._bars is None:
            elapsed_s = time.monotonic() - self._started
            sys.stderr.write(f"[{elapsed_s:5.1f} s] {phase}: {step}\n")
            sys.stderr.flush()
            return
        description = f"{phase:8} {step}"
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(description, total=1)
        done = 1 if step == DONE else 0
        self._bars.update(self._tasks[phase], description=description, completed=done)
