"""What is shown on standard error while something is made: rows that live on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import ProgressColumn, Task, TextColumn
from rich.text import Text


class Display:
    """Holds the rows; `bars` is None where standard error is no terminal. Use it as a context manager."""

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

    def write(self, words: str) -> None:
        """A plain line, with the seconds since the beginning."""
        elapsed_s = time.monotonic() - self._began_s
        sys.stderr.write(f"[{elapsed_s:6.1f} s] {words}\n")
        sys.stderr.flush()


def words_column() -> TextColumn:
    """What a row is about, as it is: no markup."""
    return TextColumn("{task.description}", markup=False)


class LeftColumn(ProgressColumn):
    """The time left of a row whose field `ends_s` says when it will probably end; nothing where unknown."""

    def render(self, task: Task) -> Text:
        """Counts down; what takes longer than it was thought to says so."""
        ends_s: float | None = task.fields.get("ends_s")
        if ends_s is None or task.finished:
            return Text("")
        return Text(left_words(ends_s - time.monotonic()))


def left_words(seconds: float) -> str:
    """`about 12 s left`."""
    return "longer than thought" if seconds < 0 else f"about {format_left(seconds)} left"


def format_left(seconds: float) -> str:
    """A rough time for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
