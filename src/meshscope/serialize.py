"""Converts frozen dataclasses to plain JSON values and back, by their type hints.

Handled: dataclasses, enums, tuples, lists, mappings, optional values, and unions of dataclasses,
which are distinguished by their field names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

STORED = "stored_as"  # metadata of a field whose stored key is not its name

_SCALARS = (str, int, float, bool, NoneType)


class FormatError(ValueError):
    """A stored value that does not have the type of its field; the message starts with the key path."""


def to_plain(value: Any) -> Any:
    """The value as dicts, lists, strings, numbers, booleans and None, with the fields as keys."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, _SCALARS):
        return value
    if is_dataclass(value):
        return {_key(field): to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no plain form")


def picked(source: Any, *names: str) -> dict[str, Any]:
    """The fields or properties of an object with these names, as they are."""
    return {name: getattr(source, name) for name in names}


def from_plain(kind: type[T], value: Any, path: str = "") -> T:
    """The `kind` that `to_plain` wrote; FormatError names the key path of the first wrong value.

    A missing key takes the default of its field. An unknown key is an error.
    """
    return _convert(kind, value, path)


def _convert(kind: Any, value: Any, path: str) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _convert(_member(get_args(kind), value, path), value, path)
    if is_dataclass(kind):
        return _record(kind, value, path)
    if origin is not None:
        return _container(origin, get_args(kind), value, path)
    return _scalar(kind, value, path)


def _container(origin: Any, kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if origin is tuple:
        return _tuple(kinds, value, path)
    if issubclass(origin, Mapping):
        return _mapping(kinds, value, path)
    return [_convert(kinds[0], item, f"{path}[{i}]") for i, item in _items(value, path)]


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value if isinstance(value, str | int) else None)
        except ValueError:
            members = ", ".join(repr(member.value) for member in kind)
            raise _wrong(path, f"one of {members}", value) from None
    if kind is float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise _wrong(path, "a finite number", value)
        return value
    if type(value) is not kind:
        names = {str: "text", int: "a whole number", bool: "true or false", NoneType: "null"}
        raise _wrong(path, names.get(kind, kind.__name__), value)
    return value


def _record(kind: Any, value: Any, path: str) -> Any:
    """A dataclass from an object; its own checks may refuse the values."""
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object", value)
    hints, known = _hints(kind), {_key(field): field for field in fields(kind)}
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise FormatError(f"{_at(path, str(unknown))}: unknown key")
    missing = next((n for n, f in known.items() if _is_required(f) and n not in value), None)
    if missing is not None:
        raise FormatError(f"{_at(path, missing)}: missing key")
    names = {key: known[key].name for key in value}
    return kind(**{n: _convert(hints[n], value[k], _at(path, k)) for k, n in names.items()})


def _tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    items = _items(value, path)
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(items)
    if len(kinds) != len(items):
        raise _wrong(path, f"a list of {len(kinds)} values", value)
    return tuple(_convert(kinds[i], item, f"{path}[{i}]") for i, item in items)


def _mapping(kinds: tuple[Any, ...], value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object", value)
    return {
        _convert(kinds[0], key, _at(path, str(key))): _convert(kinds[1], item, _at(path, str(key)))
        for key, item in value.items()
    }


def _items(value: Any, path: str) -> list[tuple[int, Any]]:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list", value)
    return list(enumerate(value))


def _member(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """The member of a union that the value belongs to: by null, type, or field names."""
    if value is None and NoneType in kinds:
        return NoneType
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        return others[0]
    records = [kind for kind in others if is_dataclass(kind)]
    if records and isinstance(value, Mapping):
        return max(records, key=lambda kind: _likeness(kind, value.keys()))
    exact = next((kind for kind in others if type(value) is kind), None)
    if exact is None:
        raise _wrong(path, " or ".join(getattr(k, "__name__", str(k)) for k in others), value)
    return exact


def _likeness(kind: Any, keys: Any) -> tuple[bool, int]:
    """Whether the keys make this dataclass, and how many of them are its fields."""
    names = {_key(field) for field in fields(kind)}
    required = {_key(field) for field in fields(kind) if _is_required(field)}
    return required <= keys <= names, len(names & keys)


def _key(field: "Field[Any]") -> str:
    return field.metadata.get(STORED, field.name)


def _is_required(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _wrong(path: str, expected: str, value: Any) -> FormatError:
    text = repr(value)
    shown = text if len(text) <= 40 else f"{text[:37]}..."  # a stored value may be of any size
    return FormatError(f"{path or 'value'}: expected {expected}, got {shown}")
