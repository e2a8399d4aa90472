"""Tables of cases that are CSV files beside their tests, with semicolons because plans have commas."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec


def read_cases(path: Path, case: Callable[..., Any], **where: str) -> list[Any]:
    """A NamedTuple `case` for each line of the file whose further columns have the values `where`.

    An empty cell takes the default of its field, or None. Lines that begin with # are comments.
    """
    types = get_type_hints(case)
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    rows = csv.DictReader(lines, delimiter=";")
    return [
        case(
            **{n: msgspec.convert(row[n], t, strict=False) for n, t in types.items() if row.get(n)}
        )
        for row in rows
        if all(row[name] == value for name, value in where.items())
    ]
