"""Strings from files and users made safe to print: no character of theirs steers a terminal."""

import unicodedata


def plain(text: object) -> str:
    """The text with every control, format and unassigned character written as an escape."""
    return "".join(map(_visible, str(text)))


def _visible(character: str) -> str:
    if character == " " or not unicodedata.category(character).startswith(("C", "Z")):
        return character
    return character.encode("unicode_escape").decode("ascii")
