"""Kimi delta attention (arXiv 2510.26692): the gated delta rule, whose decays differ between the channels of a key."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from meshscope.model.arrays import LAYER_BASE, Dim, Weight, WeightBuilder, letters
from meshscope.model.layers import Layer
from meshscope.model.mechanisms import attention as base
from meshscope.model.mechanisms.linear import F32_BYTES, LinearAttention
from meshscope.model.reader import ConfigReader, refuse

CHANNEL_CHUNK = 16  # positions of a prompt that are computed at once, pair by pair of positions


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaAttention(LinearAttention):
    """The gated delta rule with a decay for each channel: keys and values have as many heads, of one width."""

    mechanism = base.Mechanism.KIMI_DELTA
    copied_stacks = frozenset({"wq", "wk", "wv"})
    chunk = CHANNEL_CHUNK

    lower_bound: float | None = None  # of logarithms of decays
    is_wide: bool = False  # decays and the gate of the output are projections of the hidden state

    @classmethod
    def read(
        cls, reader: ConfigReader, *, has_bound: bool = False, is_wide: bool = False
    ) -> "KimiDeltaAttention":
        """The sizes in `linear_attn_config`, with the defaults of KimiLinearConfig or Glm5NextTextConfig."""
        of = ConfigReader(reader.mapping("linear_attn_config"), reader.source)
        n_heads = of.integer(
            "num_heads", reader.integer("linear_num_heads", 64 if has_bound else 32)
        )
        width = of.integer("head_dim", reader.integer("linear_head_dim", 128))
        n_conv = reader.integer("linear_conv_kernel_dim", 4)
        conv_width = of.integer("short_conv_kernel_size", n_conv, minimum=2)
        bound = None
        if has_bound:
            bound = of.number("gate_lower_bound", reader.number("linear_lower_bound", -5.0))
            is_unsafe = not of.boolean("safe_gate", default=True)
            is_unsafe |= reader.config.get("linear_lower_bound", bound) is None
            refuse(reader.source, {"decays without 'linear_lower_bound' are not known": is_unsafe})
        reader.used |= {f"linear_attn_config.{key}" for key in of.used}
        return cls(
            n_key_heads=n_heads,
            n_value_heads=n_heads,
            key_dim=width,
            value_dim=width,
            conv_width=conv_width,
            lower_bound=bound,
            is_wide=is_wide,
        )

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """Heads are split over tp; decays and the gate of the output pass a replicated projection of one head's width."""
        n, h = self.n_value_heads, self.value_dim
        dims = letters(Dim.HIDDEN, D=hidden, R=h) | letters(Dim.NORM, c=self.conv_width, r=h)
        dims |= letters(Dim.HEADS, N=n, W=n * h) | letters(Dim.HEAD_DIM, h=h)
        builder = WeightBuilder(f"{LAYER_BASE}self_attn.", dims)
        for name in "qkv":
            yield builder.matrix(f"w{name}", "DNh", f"{name}_proj.weight")
        for name in "qkv":
            yield builder.vector(f"conv_{name}", "Wc", f"{name}_conv1d.weight")
        for name in "fg" if self.is_wide else "":
            yield builder.matrix(f"w{name}", "DNh", f"{name}_proj.weight")
        for name in "" if self.is_wide else "fg":
            yield builder.matrix(f"w{name}_a", "Dr", f"{name}_a_proj.weight")
            yield builder.matrix(f"w{name}_b", "RNh", f"{name}_b_proj.weight")
        yield builder.matrix("wb", "DN", "b_proj.weight", inputs=())
        dtype = None if self.lower_bound is None else "f32"
        yield replace(builder.vector("decay_log", "N", "A_log"), dtype=dtype)
        yield replace(builder.vector("decay_bias", "Nh", "dt_bias"), dtype=dtype)
        yield builder.vector("state_norm", "h", "o_norm.weight")
        yield builder.matrix("wo", "NhD", "o_proj.weight", inputs=(0, 1))

    def step_bytes(self, step: base.AttentionStep) -> float:
        """As linear attention, with a decay for each channel."""
        decays = step.n_tokens * 2 * self.n_value_heads * self.key_dim * F32_BYTES / step.tp
        return LinearAttention.step_bytes(self, step) + decays


kimi_delta_of = partial(base.narrowed, kind=KimiDeltaAttention)
