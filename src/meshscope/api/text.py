"""Renders a view as plain text of a given width."""

from collections.abc import Callable, Iterable
from io import StringIO

from rich.console import Console, RenderableType


def rendered(view: Callable[[Console], Iterable[RenderableType]], width: int) -> str:
    """The view as text lines without color or trailing blanks."""
    out = StringIO()
    console = Console(
        file=out, width=width, color_system=None, highlight=False, markup=False, emoji=False
    )
    for part in view(console):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
