"""Rotary position embeddings, and their keys in a Hugging Face config."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshscope.errors import SpecError
from meshscope.model.reader import ROPE_OBJECTS, ConfigReader

# The old name of Phi-3, and the rotary embedding of images and text, which text turns by its positions alone.
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}


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
    `rotary_frac` of the channels turn, or of the pairs if the type is `proportional`. LongRoPE divides each frequency by its own factor, one of
    `short_factors` or, if `is_long`, of `long_factors`.
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
    """Read `rope_theta` and `rope_scaling`, or the `rope_parameters` of transformers 5.

    `rope_parameters` may have an entry for each type of layer.
    """
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
    fallback = reader.optional_integer("max_position_embeddings") or 8192
    theta = scaling.number("rope_theta", 10_000.0)
    factor = scaling.number("factor", 1.0)
    for key, value in (("rope_theta", theta), ("factor", factor)):
        if value <= 0:
            raise SpecError(f"{reader.source}: '{key}' must be positive, got {value:g}.")
    rope = Rope(
        theta=theta,
        rope_type=RopeType(name),
        factor=_longrope_factor(scaling) if name == "longrope" else factor,
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        original_max_position=scaling.integer("original_max_position_embeddings", fallback),
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


def _longrope_factor(scaling: ConfigReader) -> float:
    """The longest sequence over the original one."""
    original = scaling.integer("original_max_position_embeddings")
    return scaling.integer("max_position_embeddings") / original
