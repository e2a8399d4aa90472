"""Text for terminals: strings from files and users made safe to print, and sentences as lines of 80 columns."""

import textwrap
import unicodedata
from collections.abc import Iterator

MAX_NAME = 300  # characters of a name in a table; real names have about a hundred


def short(text: object, limit: int = MAX_NAME) -> str:
    """`plain`, cut after `limit` characters, with the full length."""
    whole = str(text)
    if len(whole) <= limit:
        return plain(whole)
    return f"{plain(whole[:limit])}... [{len(whole):,} characters]"


def plain(text: object) -> str:
    """The text with every control, format and unassigned character escaped."""
    return "".join(map(_escape, str(text)))


def _escape(character: str) -> str:
    if character == " " or not unicodedata.category(character).startswith(("C", "Z")):
        return character
    return character.encode("unicode_escape").decode("ascii")


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
