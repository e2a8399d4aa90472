"""Typed access to a Hugging Face config; errors name the file and the key."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshscope.errors import SpecError

Config = Mapping[str, Any]
ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
# Above every size of a published model, such as the longest context of 10,485,760 positions.
MAX_SIZE = 2**24
MAX_LAYERS = 10_000


def refuse(source: str, problems: Mapping[str, bool]) -> None:
    """Raise SpecError for the first problem that the config has."""
    for problem, is_there in problems.items():
        if is_there:
            raise SpecError(f"{source}: {problem}. Correct the config.")


class NestedConfig(Mapping[str, Any]):
    """A config object that adds requested keys to `used`, prefixed by its name and a dot."""

    def __init__(self, values: Config, name: str, used: set[str]) -> None:
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

    `used` collects the keys that were asked for, an object's after its name and a dot; those with positions are `rope`.
    """

    def __init__(self, config: Config, source: str, used: set[str] | None = None) -> None:
        self.config = config
        self.source = source
        self.used = set[str]() if used is None else used

    def over(self, config: Config) -> "ConfigReader":
        """A reader of a changed config."""
        return ConfigReader(config, self.source, self.used)

    def get(self, *keys: str) -> Any:
        """The value of the first of these keys that has one; None without."""
        self.used.update(keys)
        return next((v for key in keys if (v := self.config.get(key)) is not None), None)

    def _error(self, key: str, rule: str) -> SpecError:
        return SpecError(f"{self.source}: '{key}' {rule}")

    def _typed(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise SpecError(
                f"{self.source}: the config has no '{key}'. Use the model's complete config.json."
            )
        if type(value) not in kinds:
            raise self._error(key, f"must be {what}, got {value!r}.")
        return value

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """An integer from `minimum` to `maximum`."""
        value = self._typed(key, default, (int,), "an integer")
        if value < minimum:
            least = "positive" if minimum == 1 else f"at least {minimum}"
            raise self._error(key, f"must be {least}, got {value}.")
        if value > maximum:
            rule = f"is {value}, more than any model has. Use at most {maximum:,}."
            raise self._error(key, rule)
        return value

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None if absent."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._typed(key, default, (int, float), "a number")
        if not math.isfinite(value):
            raise self._error(key, f"must be finite, got {value}. Correct the config.")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        """A number above 0."""
        if (value := self.number(key, default)) <= 0:
            raise self._error(key, f"must be positive, got {value:g}. Correct the config.")
        return value

    def optional_number(self, key: str) -> float | None:
        """A number, or None if absent."""
        return None if self.get(key) is None else self.number(key)

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false."""
        return self._typed(key, default, (bool,), "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return self._typed(key, default, (str,), "a string")

    def one_of(self, key: str, known: Iterable[str], default: str) -> str:
        """A string from `known`."""
        if (value := self.text(key, str(default))) not in (names := list(map(str, known))):
            rule = f"{key}={value!r} is not supported. Supported: {', '.join(names)}."
            raise SpecError(f"{self.source}: {rule}")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer that may be 0."""
        return default if self.get(key) is None else self.integer(key, minimum=0)

    def integers(self, key: str) -> list[int]:
        """A list of integers, empty if absent."""
        values = self.get(key) or []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self._error(key, f"must be a list of integers, got {values!r}.")
        return values

    def flags(self, key: str, n_layers: int) -> list[int]:
        """A list of 0 or another number for each layer."""
        values = self.integers(key)
        if len(values) != n_layers:
            raise self._error(
                key, f"has {len(values)} values for {n_layers} layers. Give one for each."
            )
        return values

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, empty if absent."""
        values = self.get(key) or []
        numbers: list[Any] = values if isinstance(values, list) else [None]
        if not all(type(v) in {int, float} and math.isfinite(v) for v in numbers):
            raise self._error(key, f"must be a list of finite numbers, got {values!r}.")
        return tuple(map(float, numbers))

    def names(self, key: str, n_names: int, known: Iterable[str], default: list[str]) -> list[str]:
        """A list of `n_names` names from `known`, one per layer."""
        values, known = self.get(key), list(known)
        if values is None:
            return default
        is_list = isinstance(values, list) and len(values) == n_names
        wrong = [value for value in values if value not in known] if is_list else []
        if not is_list or wrong:
            is_short = isinstance(values, list) and not is_list
            got = f"{len(values)} entries" if is_short else f"{wrong or values!r:.60}"
            rule = f"one of {', '.join(known)} for each of {n_names} layers, got {got}."
            raise self._error(key, f"must list {rule}")
        return values

    def mapping(self, key: str) -> Config:
        """An object, empty if absent."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._error(key, f"must be an object, got {value!r}.")
        return value


# The old name of Phi-3, the rotary embedding of images and text, which text turns by its positions alone, and Grok-2's
# name of one that is not scaled.
_ROPE_ALIASES = {"su": "longrope", "mrope": "default", "original": "default"}


class RopeType(StrEnum):
    """How rotary frequencies are scaled for long contexts."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"  # Gemma 4: all channels are paired, the last pairs do not turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding; names as in `transformers.modeling_rope_utils`.

    `is_interleaved` pairs channel 2i with 2i+1 (DeepSeek), otherwise i with i + half. Only the first
    `rotary_frac` of the channels turn, or of the pairs if the type is `proportional`. LongRoPE divides each
    frequency by a separate factor, from `short_factors` or, if `is_long`, `long_factors`.
    """

    theta: float
    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    is_truncated: bool = True
    is_interleaved: bool = False
    rotary_frac: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Channels of a head that are paired."""
        is_whole = self.rope_type is RopeType.PROPORTIONAL
        return head_dim if is_whole else int(head_dim * self.rotary_frac)


def read_rope(reader: ConfigReader, layer_type: str | None = None) -> Rope:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters` of transformers 5, which may have an entry per layer type."""
    merged = dict(reader.config)
    for key in ROPE_OBJECTS:
        parameters = reader.get(key) or {}
        if isinstance(parameters, Mapping) and layer_type in parameters:
            parameters = parameters[layer_type] or {}
        if not isinstance(parameters, Mapping):
            raise SpecError(f"{reader.source}: '{key}' must be an object, got {parameters!r}.")
        merged |= parameters
    scaling = ConfigReader(merged, reader.source)
    name = scaling.text("rope_type", scaling.text("type", RopeType.DEFAULT.value))
    name = _ROPE_ALIASES.get(name, name)
    if name not in set(RopeType):
        raise SpecError(
            f"{reader.source}: rope type '{name}' is not supported. Supported: {', '.join(RopeType)}."
        )
    is_longrope = name == "longrope"
    fallback = reader.optional_integer("max_position_embeddings") or 8192
    factor = scaling.positive("factor", 1.0)
    original = scaling.integer(
        "original_max_position_embeddings", None if is_longrope else fallback
    )
    # LongRoPE has the longest sequence over the original one.
    longest = scaling.integer("max_position_embeddings") if is_longrope else 0
    rope = Rope(
        theta=scaling.positive("rope_theta", 10_000.0),
        rope_type=RopeType(name),
        factor=longest / original if is_longrope else factor,
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        attention_factor=scaling.optional_number("attention_factor"),
        is_truncated=scaling.boolean("truncate", default=True),
        rotary_frac=scaling.number("partial_rotary_factor", 1.0),
        short_factors=scaling.numbers("short_factor"),
        long_factors=scaling.numbers("long_factor"),
    )
    reader.used |= scaling.used | {f"rope.{key}" for key in scaling.used}
    return rope


def check_factors(rope: Rope, head_dim: int, source: str) -> None:
    """SpecError unless LongRoPE has a factor for every pair of channels."""
    n_pairs = rope.rotary_dim(head_dim) // 2
    n_short, n_long = len(rope.short_factors), len(rope.long_factors)
    if rope.rope_type is RopeType.LONGROPE and (n_short, n_long) != (n_pairs, n_pairs):
        raise SpecError(
            f"{source}: longrope needs {n_pairs} numbers in short_factor and in long_factor, got {n_short} "
            f"and {n_long}. Use the model's complete config.json."
        )
