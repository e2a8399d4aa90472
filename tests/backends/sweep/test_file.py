"""A sweep file is read as plain values, and what would make much of little is refused."""

from pathlib import Path

import pytest
from tables import table

from meshscope.backends.sweep.file import MAX_BYTES, MAX_DEPTH, read_document
from meshscope.errors import ParseError


def read(folder: Path, text: str) -> dict:
    path = folder / "s.yaml"
    path.write_text(text)
    return read_document(path)


@table
def test_words_are_what_they_look_like(tmp_path: Path, written: str, value: object) -> None:
    scalar = read(tmp_path, f"a: {written}\n")["a"]
    assert (scalar, type(scalar)) == (value, type(value))


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"s.yaml:2: aliases .* are not allowed"),
        ("a: 1\nb: 2\na: 3\n", r"s.yaml:3: 'a' is repeated"),
        ("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 8 deep"),
        ("a: " + "[" * 100_000, "nested more than 8 deep"),
        ("a: !!python/object/apply:os.system [ls]", "tags .* are not allowed"),
        ("- 1\n", "a sweep file is a mapping"),
        ("", "a sweep file is a mapping"),
        ("a: [1", r"s.yaml:1: "),
        ("a: b: c", r"s.yaml:1: mapping values are not allowed here"),
        ("? [a]\n: 1\n", "a key must be text"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: \x00", "not YAML"),
        ("#" * (MAX_BYTES + 1), "larger than 1,000,000 bytes"),
    ],
)
def test_what_is_no_sweep_file_is_one_message(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="cannot read"):
        read_document(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ParseError, match="not UTF-8"):
        read_document(tmp_path / "b.yaml")
