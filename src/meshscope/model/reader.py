"""Typed access to a Hugging Face config; errors name the file and the key."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshscope.errors import SpecError

ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
# Above every size of a published model, such as the 10,485,760 positions of Llama 4 Scout.
MAX_SIZE = 2**24
MAX_LAYERS = 10_000


class NestedConfig(Mapping[str, Any]):
    """An object of a config that adds the keys that are asked for to `used`, after its own name and a dot."""

    def __init__(self, values: Mapping[str, Any], name: str, used: set[str]) -> None:
        self._values, self._name, self._used = values, name, used

    def __getitem__(self, key: str) -> Any:
        self._used.add(path := f"{self._name}.{key}")
        value = self._values[key]
        return NestedConfig(value, path, self._used) if isinstance(value, Mapping) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class ConfigReader:
    """Typed access to a config mapping; errors name the file and the key.

    `used` collects the keys that were asked for, also by the readers that `over` makes. Those of an object follow its
    name and a dot; `rope` is the name of all objects with positions.
    """

    def __init__(
        self, config: Mapping[str, Any], source: str, used: set[str] | None = None
    ) -> None:
        self.config = config
        self.source = source
        self.used = set[str]() if used is None else used

    def over(self, config: Mapping[str, Any]) -> "ConfigReader":
        """A reader of a changed config."""
        return ConfigReader(config, self.source, self.used)

    def get(self, *keys: str) -> Any:
        """The value of the first of these keys that has one; None without."""
        self.used.update(keys)
        return next((v for key in keys if (v := self.config.get(key)) is not None), None)

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            if default is None:
                raise SpecError(
                    f"{self.source}: the config has no '{key}'. Use the model's complete config.json."
                )
            return default
        return value

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """An integer from `minimum` to `maximum`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(f"{self.source}: '{key}' must be an integer, got {value!r}.")
        if value < minimum:
            raise SpecError(f"{self.source}: '{key}' must be positive, got {value}.")
        if value > maximum:
            raise SpecError(
                f"{self.source}: '{key}' is {value}, more than any model has. Use at most {maximum:,}."
            )
        return value

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None if absent."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{self.source}: '{key}' must be a number, got {value!r}.")
        if not math.isfinite(value):
            raise SpecError(
                f"{self.source}: '{key}' must be finite, got {value}. Correct the config."
            )
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number, or None if absent."""
        return None if self.get(key) is None else self.number(key)

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise SpecError(f"{self.source}: '{key}' must be true or false, got {value!r}.")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer that may be 0."""
        return default if self.get(key) is None else self.integer(key, minimum=0)

    def integers(self, key: str) -> list[int]:
        """A list of integers, empty if absent."""
        values = self.get(key) or []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise SpecError(f"{self.source}: '{key}' must be a list of integers, got {values!r}.")
        return values

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, empty if absent."""
        values = self.get(key) or []
        if not isinstance(values, list) or not all(
            type(v) in {int, float} and math.isfinite(v) for v in values
        ):
            raise SpecError(
                f"{self.source}: '{key}' must be a list of finite numbers, got {values!r}."
            )
        return tuple(float(value) for value in values)

    def names(self, key: str, n_names: int, known: Iterable[str], default: list[str]) -> list[str]:
        """A list of `n_names` names from `known`, one per layer."""
        values = self.get(key)
        if values is None:
            return default
        known = list(known)
        if (
            not isinstance(values, list)
            or len(values) != n_names
            or any(value not in known for value in values)
        ):
            raise SpecError(
                f"{self.source}: '{key}' must list one of {', '.join(known)} for each of {n_names} layers."
            )
        return values

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise SpecError(f"{self.source}: '{key}' must be a string, got {value!r}.")
        return value
