"""No character from a file or a user controls the terminal."""

import unicodedata

import pytest

from meshscope.reports.model import plain, short


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("bf16[8,1024]", "bf16[8,1024]"),
        ("[bold]x[/]", "[bold]x[/]"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\u202eabc", "\\u202eabc"),  # right-to-left override
        ("\udcff", "\\udcff"),  # a byte that was not UTF-8
        ("\x9b31m", "\\x9b31m"),  # the one-byte form of ESC [
        ("naïve 名前", "naïve 名前"),
        (3, "3"),
    ],
)
def test_plain(text: object, escaped: str) -> None:
    assert plain(text) == escaped


def test_every_control_and_format_character_is_escaped() -> None:
    text = plain("".join(map(chr, range(0x3000))))
    assert {unicodedata.category(c) for c in text} & {
        *("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"),
    } == set()


def test_a_long_name_is_cut_with_its_length() -> None:
    assert short("x" * 300) == "x" * 300
    assert short("\x1b" + "x" * 999_999, 5) == "\\x1bxxxx... [1,000,000 characters]"
