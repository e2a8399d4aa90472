"""Text from profiles and programs, made fit to show."""

import re

MAX_CHARACTERS = 2_000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without control characters, cut after MAX_CHARACTERS with a note of its length."""
    is_short = len(text) <= MAX_CHARACTERS
    cut = text if is_short else f"{text[:MAX_CHARACTERS]}... [{len(text):,} characters]"
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", cut)
