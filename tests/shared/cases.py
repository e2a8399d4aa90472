"""Tables of cases that are CSV files beside their tests, with semicolons because plans have commas.

Lines that begin with # are comments.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]


def read_rows(path: Path, *types: type) -> list[tuple[Any, ...]]:
    """The cells of each line behind the header as these types, None where a cell is empty."""
    return [
        tuple(
            msgspec.convert(cell, kind, strict=False) if cell else None
            for cell, kind in zip(row, types, strict=True)
        )
        for row in csv.reader(_lines(path)[1:], delimiter=";")
    ]


def read_cases(path: Path, case: Callable[..., Any], **where: str) -> list[Any]:
    """A NamedTuple `case` for each line whose further columns have the values `where`.

    An empty cell takes the default of its field.
    """
    types, rows = get_type_hints(case), list(csv.DictReader(_lines(path), delimiter=";"))
    unread = {column for row in rows for column in row} - types.keys() - where.keys()
    assert not unread, f"{path.name}: no field takes {unread}"
    return [
        case(
            **{n: msgspec.convert(row[n], t, strict=False) for n, t in types.items() if row.get(n)}
        )
        for row in rows
        if all(row[name] == value for name, value in where.items())
    ]
