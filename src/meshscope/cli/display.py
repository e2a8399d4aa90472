"""The display on standard error: live rows on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import ProgressColumn, Task, TextColumn
from rich.text import Text


class Display:
    """A context manager that shows rows; `bars` is None if standard error is not a terminal."""

    def __init__(self, *columns: ProgressColumn) -> None:
        self._columns = columns
        self._began_s = time.monotonic()
        self.bars: Bars | None = None

    def __enter__(self) -> Self:
        """Starts the display."""
        if sys.stderr.isatty():
            console = Console(stderr=True, markup=False, highlight=False)
            self.bars = Bars(*self._columns, console=console)
            self.bars.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the display; its last state stays on the screen."""
        if self.bars is not None:
            self.bars.stop()

    def write(self, text: str) -> None:
        """Writes a plain line that starts with the elapsed seconds."""
        elapsed_s = time.monotonic() - self._began_s
        sys.stderr.write(f"[{elapsed_s:6.1f} s] {text}\n")
        sys.stderr.flush()


def text_column() -> TextColumn:
    """The description of a row, without markup."""
    return TextColumn("{task.description}", markup=False)


class TimeLeftColumn(ProgressColumn):
    """Time left of a row, from its field `ends_s`; empty if the field is not set."""

    def render(self, task: Task) -> Text:
        """Counts down, and reports when the row takes longer than expected."""
        ends_s: float | None = task.fields.get("ends_s")
        if ends_s is None or task.finished:
            return Text("")
        return Text(time_left_text(ends_s - time.monotonic()))


def time_left_text(seconds: float) -> str:
    """`about 12 s left`."""
    return "longer than expected" if seconds < 0 else f"about {format_left(seconds)} left"


def format_left(seconds: float) -> str:
    """A rough time: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
