"""Sentences as lines within 80 columns."""

import textwrap
from collections.abc import Iterator

WIDTH = 80


def wrapped(text: str, *, indent: int = 0) -> Iterator[str]:
    """The lines of a paragraph; words longer than a line stay whole."""
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
