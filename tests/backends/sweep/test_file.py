"""A sweep file is read as plain values, and what would make much of little is refused."""

from pathlib import Path
from typing import Any

import pytest
from tables import table

from meshscope.backends.sweep.file import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_EXPERIMENTS,
    entries_of,
    read_document,
)
from meshscope.errors import ParseError, SpecError


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


KNOWN = ("model", "topology", "plan", "batch", "partitioner")


def values(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(asked.values) for asked in entries_of(document, known=KNOWN)]


def test_a_grid_is_every_combination_in_the_order_of_the_file() -> None:
    grid = {"model": ["m", "n"], "plan": "tp=8", "batch": [1, 2]}
    assert values({"grid": grid}) == [
        {"model": model, "plan": "tp=8", "batch": batch} for model in "mn" for batch in (1, 2)
    ]


def test_defaults_fill_what_an_experiment_leaves_out() -> None:
    experiments = values(
        {
            "defaults": {"slice": "v6e-8", "batch": 4},
            "experiments": [{"model": "m"}, {"model": "n", "batch": 1}],
        }
    )
    assert experiments == [
        {"topology": "v6e-8", "batch": 4, "model": "m"},
        {"topology": "v6e-8", "batch": 1, "model": "n"},
    ]


def test_options_that_go_together_are_one_choice() -> None:
    """They stand under a name of their own, and go before the defaults."""
    ways = [{"plan": "tp=8", "topology": "a"}, {"plan": "dp=8", "topology": "b"}]
    written = [{"plan": "tp=8", "slice": "a"}, {"plan": "dp=8", "slice": "b"}]
    experiments = values(
        {"defaults": {"plan": "tp=1"}, "grid": {"model": ["m", "n"], "way": written}}
    )
    assert experiments == [{"model": model, **way} for model in "mn" for way in ways]


def test_grids_and_experiments_may_both_be_several() -> None:
    document = {
        "grid": [{"model": "m", "batch": [1, 2]}, {"model": "n"}],
        "experiments": [{"model": ["o", "p"]}],
    }
    asked = entries_of(document, known=KNOWN)
    assert [a.section for a in asked] == ["grid 1", "grid 1", "grid 2", *["experiments 1"] * 2]
    assert str(asked[1]) == "grid 1 (model: m, batch: 2)"


def test_exclusions_take_out_what_they_meet() -> None:
    document = {
        "grid": {"model": ["m", "n"], "batch": [1, 2, 3]},
        "exclude": [{"model": "m", "batch": [1, 2]}, {"batch": 3}],
    }
    assert values(document) == [{"model": "n", "batch": 1}, {"model": "n", "batch": 2}]


@table
def test_a_fault_of_the_file_is_one_message(document: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        values(document)


def test_too_many_experiments_are_refused() -> None:
    with pytest.raises(SpecError, match="10,000,000,000 experiments; 1 to"):
        values({"grid": {name: list(range(100)) for name in KNOWN}})


def test_as_many_as_the_limit_says() -> None:
    assert len(values({"grid": {"batch": list(range(MAX_EXPERIMENTS))}})) == MAX_EXPERIMENTS
