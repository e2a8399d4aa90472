"""What commands print: results on standard output, progress and warnings on standard error."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, RenderableType
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from meshscope.errors import UsageError
from meshscope.reports.answer import rests_on
from meshscope.reports.tables import shown_lines
from meshscope.reports.text import answer_text, full_text, rows_text
from meshscope.workers import Progress

if TYPE_CHECKING:
    from meshscope.api.run import Run
    from meshscope.store.run import RunRecord

PIPED_WIDTH = 80  # table columns in a file or a pipe, unless COLUMNS is set


class Shown(NamedTuple):
    """What a command shows: one document with --json, else the parts of a text, of which strings are not wrapped.

    The text stops after its first block, unless it `is_whole` or with --full, which shows `full` if that differs.
    """

    document: Callable[[], Any]
    text: Callable[[Console], Iterable[RenderableType]]
    full: Callable[[Console], Iterable[RenderableType]] | None = None
    is_whole: bool = False
    chosen: str = ""  # the option that asked for another format, whose text is whole
    basis: str = ""  # of the figures in a text that names none
    check: Callable[[], None] = lambda: None  # raises an error afterwards
    is_failed: bool = False  # exits with 1 afterwards

    def show(self, *, as_json: bool, full: bool = False) -> None:
        """Prints the document or the text, then fails if what is shown failed."""
        if as_json and self.chosen:
            raise UsageError(f"give one of --json and {self.chosen}")
        is_whole = self.is_whole or bool(self.chosen)
        if full and (as_json or (is_whole and self.full is None)):
            note("--full adds nothing to this output, which is whole")
        if as_json:
            print_json(self.document())
        else:
            console = new_console()
            parts = (self.full or self.text if full else self.text)(console)
            print_all(console, parts, "" if is_whole else self.basis, is_whole=full or is_whole)
        self.check()
        if self.is_failed:
            raise SystemExit(1)


class Written(NamedTuple):
    """What a command wrote: one document with --json, else a line on standard error."""

    document: Any
    line: str

    def show(self, *, as_json: bool) -> None:
        """Prints the document, or the line."""
        if as_json:
            print_json(self.document)
        else:
            note(self.line)


def basis_of(*runs: "RunRecord") -> str:
    """What the figures of the runs rest on, each basis once."""
    return "; ".join(filter(None, dict.fromkeys(next(rests_on(run), "") for run in runs)))


def shown_run(run: "Run", *, rows: bool, n_findings: int | None = None) -> Shown:
    """The answer of the run, its tables, or its document; warnings go to standard error.

    `n_findings` of lint, if it was asked, are in the verdict on the collectives.
    """
    for warning in run.warnings:
        note(warning)
    basis = basis_of(run.record)
    if rows:
        return Shown(run.as_dict, partial(rows_text, run.record), is_whole=True, basis=basis)
    text = partial(answer_text, run.record, n_findings=n_findings)
    return Shown(run.as_dict, text, partial(full_text, run.record), basis=basis)


def new_console() -> Console:
    """Standard output: color on a terminal, plain text elsewhere; nothing is cut off."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_all(
    console: Console, parts: Iterable[RenderableType], basis: str = "", *, is_whole: bool = True
) -> None:
    """Prints the parts, or their first block and the `basis` of its figures, without trailing blanks in a file."""
    with console.capture() as capture:
        for part in parts:
            (console.out if isinstance(part, str) else console.print)(part)
    lines = capture.get().splitlines()
    sys.stdout.writelines(
        f"{line if console.is_terminal else line.rstrip()}\n"
        for line in shown_lines(lines, basis, is_whole=is_whole)
    )


def print_json(document: Any) -> None:
    """Prints one document on one line, the only output on standard output."""
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")


def note(message: str) -> None:
    """Writes a line on standard error."""
    sys.stderr.write(message + "\n")


def time_left_text(seconds: float) -> str:
    """`about 12 s left`, `about 3.5 h left`."""
    if seconds < 100:
        return f"about {max(seconds, 0):.0f} s left"
    left = f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
    return f"about {left} left"


class WorkProgress(Bars):
    """A progress callback of the API: a row for each part of the work on a terminal, elsewhere plain lines."""

    def __init__(self) -> None:
        console = Console(stderr=True, markup=False, highlight=False)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )
        super().__init__(*columns, console=console, disable=not sys.stderr.isatty())
        self._began_s = time.monotonic()
        self._rows: dict[str, TaskID] = {}

    def __call__(self, part: str, step: str, left_s: float | None = None) -> None:
        """Shows the step; `left_s` are the seconds that the part still needs, if known."""
        left = "" if left_s is None else f", {time_left_text(left_s)}"
        if self.disable:
            elapsed_s = time.monotonic() - self._began_s
            sys.stderr.write(f"[{elapsed_s:6.1f} s] {part}: {step}{left}\n")
            sys.stderr.flush()
            return
        if part not in self._rows:
            self._rows[part] = self.add_task("", total=1)
        line = f"{part:8} {step}{left}"
        self.update(self._rows[part], description=line, completed=step.startswith("done"))


def reporting(callback: Progress | None, name: str = "") -> Progress:
    """Passes reports on to the callback, if there is one; `name` is a part of a run, as in `draft decode`."""

    def report(part: str, step: str, left_s: float | None) -> None:
        if callback is not None:
            callback(f"{name} {part}".strip(), step, left_s)

    return report


def echo(*lines: object) -> None:
    """Writes lines on standard output."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


def rendered(view: Callable[[Console], Iterable[RenderableType]], width: int) -> str:
    """The view as text lines without color or trailing blanks."""
    out = StringIO()
    console = Console(
        file=out, width=width, color_system=None, highlight=False, markup=False, emoji=False
    )
    for part in view(console):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
