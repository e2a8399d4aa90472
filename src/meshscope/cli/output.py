"""Where commands print: results on standard output, progress and warnings on standard error."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType

PIPED_WIDTH = 100  # columns of a table in a file or a pipe, where nobody says otherwise


def new_console() -> Console:
    """Standard output: colours on a terminal, plain text elsewhere; nothing is cut off."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_all(console: Console, parts: Iterable[RenderableType]) -> None:
    """Prints the parts one below the other; a file or a pipe gets no blanks at the ends of lines."""
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def print_json(document: Mapping[str, Any] | list[Any]) -> None:
    """One document on one line, the only thing on standard output."""
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")


def note(message: str) -> None:
    """A line on standard error."""
    sys.stderr.write(message + "\n")
