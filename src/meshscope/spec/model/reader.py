"""Typed access to a Hugging Face config; errors name the file and the key."""

from collections.abc import Iterable, Mapping
from typing import Any

from meshscope.errors import SpecError
from meshscope.spec.model.model import Rope, RopeType

# Above every size of a published model, such as the 10,485,760 positions of Llama 4 Scout.
MAX_SIZE = 2**24
MAX_LAYERS = 10_000


class ConfigReader:
    """Typed access to a config mapping; errors name the file and the key."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
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
        return None if self.config.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{self.source}: '{key}' must be a number, got {value!r}.")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number, or None if absent."""
        return None if self.config.get(key) is None else self.number(key)

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise SpecError(f"{self.source}: '{key}' must be true or false, got {value!r}.")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer that may be 0."""
        return default if self.config.get(key) is None else self.integer(key, minimum=0)

    def integers(self, key: str) -> list[int]:
        """A list of integers, empty if absent."""
        values = self.config.get(key) or []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise SpecError(f"{self.source}: '{key}' must be a list of integers, got {values!r}.")
        return values

    def names(self, key: str, n_names: int, known: Iterable[str], default: list[str]) -> list[str]:
        """A list of `n_names` names from `known`, one per layer."""
        values = self.config.get(key)
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


def read_rope(reader: ConfigReader) -> Rope:
    """Read `rope_theta` and `rope_scaling`, or the `rope_parameters` of transformers 5."""
    merged = dict(reader.config)
    for key in ("rope_scaling", "rope_parameters"):
        parameters = reader.config.get(key) or {}
        if not isinstance(parameters, Mapping):
            raise SpecError(f"{reader.source}: '{key}' must be an object, got {parameters!r}.")
        merged |= parameters
    scaling = ConfigReader(merged, reader.source)
    name = scaling.text("rope_type", scaling.text("type", RopeType.DEFAULT.value))
    if name not in set(RopeType):
        raise SpecError(
            f"{reader.source}: rope type '{name}' is not supported. Supported: {', '.join(RopeType)}."
        )
    fallback = reader.optional_integer("max_position_embeddings") or 8192
    return Rope(
        theta=scaling.number("rope_theta", 10_000.0),
        rope_type=RopeType(name),
        factor=scaling.number("factor", 1.0),
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        original_max_position=scaling.integer("original_max_position_embeddings", fallback),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        attention_factor=scaling.optional_number("attention_factor"),
        is_truncated=scaling.boolean("truncate", default=True),
    )
