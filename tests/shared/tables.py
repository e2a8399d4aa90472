"""Tables of cases beside the modules of their tests: YAML files, or CSV files if no value is nested.

CSV files have semicolons, because plans have commas, and lines that begin with # are comments.
"""

import csv
from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
import yaml


@cache
def stored(path: Path) -> dict[str, Any]:
    """The content of a YAML file by name, read once."""
    return yaml.load(path.read_text("utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def cases(module: str, make: Callable[..., Any], name: str = "cases") -> list[Any]:
    """What `make`, a NamedTuple or a function, gives for each row of a table of a module's YAML file.

    A row lists the first arguments; a last mapping has others by name.
    """
    types = {n: t for n, t in get_type_hints(make).items() if n != "return"}

    def made(row: list[Any]) -> Any:
        named = row[-1] if isinstance(row[-1], dict) and row[-1].keys() <= types.keys() else {}
        values = row[:-1] if named else row
        assert len(values) <= len(types), f"{name}: no field takes the last value of {row}"
        listed = dict(zip(types, values, strict=False))
        return make(**{n: msgspec.convert(v, types[n]) for n, v in (listed | named).items()})

    return [made(row) for row in stored(Path(module).with_suffix(".yaml"))[name]]


def table(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrizes a test by the table of its name in the YAML file of its module.

    The first row has the names of the parameters; a first column `id` has the ids of the cases.
    Values have the types of the test's annotations, such as enums and tuples.
    """
    names, *rows = stored(Path(test.__code__.co_filename).with_suffix(".yaml"))[test.__name__]
    ids = [row[0] for row in rows] if names[0] == "id" else _id
    at = int(names[0] == "id")
    types = get_type_hints(test)
    values = [
        [
            msgspec.convert(value, types.get(name, Any))
            for name, value in zip(names[at:], row[at:], strict=True)
        ]
        for row in rows
    ]
    return pytest.mark.parametrize(names[at:], values, ids=ids)(test)


def _id(value: Any) -> str | None:
    return str(value) if isinstance(value, dict | list | tuple) else None


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


def seeds(n: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test for each seed below `n` as one test, as pytest takes longer for a test than these checks."""

    def of_test(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def for_each(**given: Any) -> None:
            for seed in range(n):
                try:
                    test(seed=seed, **given)
                except BaseException as error:
                    error.add_note(f"seed {seed}")
                    raise

        shown = signature(test)
        others = [one for name, one in shown.parameters.items() if name != "seed"]
        for_each.__signature__ = shown.replace(parameters=others)
        return for_each

    return of_test
