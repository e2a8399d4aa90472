"""Strings from files and users made safe to print: no character of theirs steers a terminal."""

import unicodedata

MAX_NAME = 300  # characters of a name in a table; a real one has some hundred


def short(text: object, limit: int = MAX_NAME) -> str:
    """`plain`, of a long text the beginning alone, with how many characters it had."""
    words = str(text)
    if len(words) <= limit:
        return plain(words)
    return f"{plain(words[:limit])}... [{len(words):,} characters]"


def plain(text: object) -> str:
    """The text with every control, format and unassigned character written as an escape."""
    return "".join(map(_visible, str(text)))


def _visible(character: str) -> str:
    if character == " " or not unicodedata.category(character).startswith(("C", "Z")):
        return character
    return character.encode("unicode_escape").decode("ascii")
