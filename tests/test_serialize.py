"""Dataclasses to JSON values and back; a wrong value is an error that names its key path."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest
from tables import table

from meshscope.serialize import STORED, FormatError, from_plain, to_plain


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Line:
    length: float
    n_dots: int = field(default=0, metadata={STORED: "dots"})
    color: Color = Color.RED


@dataclass(frozen=True, kw_only=True)
class Circle:
    radius: float
    color: Color = Color.RED


@dataclass(frozen=True, kw_only=True)
class Drawing:
    name: str
    shape: Line | Circle
    shapes: tuple[Line | Circle, ...] = ()
    size: tuple[int, int] | None = None
    counts: dict[Color, int] = field(default_factory=dict)
    is_open: bool = False
    extra: Any = None
    value: str | int | None = None


DRAWING = Drawing(
    name="a",
    shape=Circle(radius=2.5, color=Color.BLUE),
    shapes=(Line(length=1, n_dots=3), Circle(radius=3)),
    size=(3, 4),
    counts={Color.RED: 2},
    extra={"x": [1, None]},
    value=7,
)


def test_a_record_comes_back_from_its_json() -> None:
    assert from_plain(Drawing, json.loads(json.dumps(to_plain(DRAWING)))) == DRAWING


def test_a_field_may_have_another_key() -> None:
    assert to_plain(Line(length=1, n_dots=2)) == {"length": 1, "dots": 2, "color": "red"}


def test_a_missing_key_takes_the_default() -> None:
    assert from_plain(Line, {"length": 2}) == Line(length=2)


@table
def test_a_wrong_value_names_its_key_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        from_plain(Drawing, to_plain(DRAWING) | change)


def test_what_has_no_plain_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no plain form"):
        to_plain(object())
