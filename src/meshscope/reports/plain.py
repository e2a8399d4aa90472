"""Makes strings from files and users safe to print: they cannot control the terminal."""

import unicodedata

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
