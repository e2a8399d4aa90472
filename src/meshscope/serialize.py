"""Converts frozen dataclasses to plain JSON values and back, by their type hints.

Handled: dataclasses, enums, tuples, lists, mappings, optional values, and unions of dataclasses,
which are distinguished by their field names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

STORED = "stored_as"  # metadata of a field whose stored key is not its name

_SCALARS = (str, int, float, bool, NoneType)
_WORDS = {str: "text", int: "a whole number", bool: "true or false", NoneType: "null"}


class FormatError(ValueError):
    """A stored value that does not have the type of its field; the message starts with the key path."""


def to_plain(value: Any) -> Any:
    """The value as dicts, lists, strings, numbers, booleans and None, with the fields as keys."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, _SCALARS):
        return value
    if is_dataclass(value):
        keys = _keys(type(value)).items()
        return {key: to_plain(getattr(value, name)) for key, (name, *_) in keys}
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
    origin, kinds = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _convert(_member(kinds, value, path), value, path)
    if is_dataclass(kind):
        return _record(kind, _of(Mapping, value, "an object", path), path)
    if origin is None:
        return _scalar(kind, value, path)
    if issubclass(origin, Mapping):
        items = _of(Mapping, value, "an object", path).items()
        places = [(key, item, _at(path, key)) for key, item in items]
        return {_convert(kinds[0], k, at): _convert(kinds[1], item, at) for k, item, at in places}
    items = _of(list | tuple, value, "a list", path)
    if origin is not tuple or kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(items)
    if len(kinds) != len(items):
        raise _wrong(path, f"a list of {len(kinds)} values", value)
    pairs = enumerate(zip(kinds, items, strict=True))
    converted = [_convert(one, item, f"{path}[{i}]") for i, (one, item) in pairs]
    return tuple(converted) if origin is tuple else converted


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if issubclass(kind, Enum):
        try:  # an enum may take older values
            return kind(value if isinstance(value, str | int) else None)
        except ValueError:
            members = ", ".join(repr(member.value) for member in kind)
            raise _wrong(path, f"one of {members}", value) from None
    if kind is float:  # a whole number stays one
        if type(value) not in {int, float} or not math.isfinite(value):
            raise _wrong(path, "a finite number", value)
    elif type(value) is not kind:
        raise _wrong(path, _WORDS.get(kind) or kind.__name__, value)
    return value


def _record(kind: Any, value: Mapping[str, Any], path: str) -> Any:
    """A dataclass from an object; its own checks may refuse the values."""
    keys = _keys(kind)
    for key in value:
        if key not in keys:
            raise FormatError(f"{_at(path, key)}: unknown key")
    for key, (_, _, is_required) in keys.items():
        if is_required and key not in value:
            raise FormatError(f"{_at(path, key)}: missing key")
    named = ((keys[key], key, item) for key, item in value.items())
    return kind(**{name: _convert(hint, v, _at(path, key)) for (name, hint, _), key, v in named})


def _member(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """The member of a union that the value belongs to: by null, type, or field names."""
    if value is None and NoneType in kinds:
        return NoneType
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        return others[0]
    records = [kind for kind in others if is_dataclass(kind)]
    if records and isinstance(value, Mapping):
        given = set(value)

        def likeness(kind: Any) -> tuple[bool, int]:
            """Whether the keys make this dataclass, and how many of them are its fields."""
            required = {key for key, (*_, is_required) in _keys(kind).items() if is_required}
            return required <= given <= set(_keys(kind)), len(given & set(_keys(kind)))

        return max(records, key=likeness)
    exact = next((kind for kind in others if type(value) is kind), None)
    exact = exact or next((k for k in others if issubclass(k, Enum) and value in list(k)), None)
    if exact is None:
        raise _wrong(path, " or ".join(getattr(k, "__name__", str(k)) for k in others), value)
    return exact


@cache
def _keys(kind: Any) -> dict[str, tuple[str, Any, bool]]:
    """Name, type and whether it is required of each field, by its stored key."""
    hints = get_type_hints(kind)
    is_required = {f.name: f.default is f.default_factory is MISSING for f in fields(kind)}
    keys = {f.metadata.get(STORED, f.name): f.name for f in fields(kind)}
    return {key: (name, hints[name], is_required[name]) for key, name in keys.items()}


def _at(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _of(kind: Any, value: Any, words: str, path: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(path, words, value)
    return value


def _wrong(path: str, expected: str, value: Any) -> FormatError:
    text = repr(value)
    shown = text if len(text) <= 40 else f"{text[:37]}..."  # a stored value may be of any size
    return FormatError(f"{path or 'value'}: expected {expected}, got {shown}")
