"""Output of commands: results on standard output, progress and warnings on standard error."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType

from meshscope.api.run import Run
from meshscope.reports.text import full_text, run_text

PIPED_WIDTH = 80  # columns of a table in a file or a pipe, unless COLUMNS is set


def print_run(run: Run, *, as_json: bool, is_full: bool) -> None:
    """Prints the answer and the tables of the run, or its document; warnings go to standard error."""
    for warning in run.warnings:
        note(warning)
    if as_json:
        print_json(run.as_dict())
        return
    console = new_console()
    print_all(console, (full_text if is_full else run_text)(run.record, console))


def new_console() -> Console:
    """Standard output: color on a terminal, plain text elsewhere; nothing is cut off."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_all(console: Console, parts: Iterable[RenderableType]) -> None:
    """Prints the parts one below the other, without trailing blanks in a file or a pipe."""
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def print_json(document: Mapping[str, Any] | list[Any]) -> None:
    """Prints one document on one line, the only output on standard output."""
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")


def note(message: str) -> None:
    """Writes a line on standard error."""
    sys.stderr.write(message + "\n")
