"""The architecture of a model: global sizes only, nothing of a mesh or a plan."""

from dataclasses import dataclass, fields
from enum import StrEnum

from meshscope.errors import SpecError


class Family(StrEnum):
    """Model families that the programs implement; the value is `model_type` of the config."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class RopeType(StrEnum):
    """How rotary frequencies are scaled for long contexts."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding; names as in `transformers.modeling_rope_utils`."""

    theta: float
    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Multi-head attention whose query heads share key and value heads in equal groups."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    has_qkv_bias: bool
    has_o_bias: bool
    has_qk_norm: bool
    rope: Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer.

    `hidden` is the width of the residual stream, `ffn` that of the gated MLP.
    """

    name: str
    family: Family
    n_layers: int
    hidden: int
    ffn: int
    vocab: int
    attention: GroupedAttention
    norm_eps: float
    has_tied_embeddings: bool
    has_mlp_bias: bool
    max_position: int | None
    source: str  # where the config was read

    def __post_init__(self) -> None:
        """Sizes are positive and heads group evenly."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
                raise SpecError(f"{self.source}: {field.name} must be positive, got {value}.")
        attention = self.attention
        if attention.n_heads % attention.n_kv_heads:
            raise SpecError(
                f"{self.source}: num_attention_heads={attention.n_heads} is not a multiple of "
                f"num_key_value_heads={attention.n_kv_heads}. Correct the config."
            )
