"""Linear attention: the gated delta rule (arXiv 2412.06464) of Qwen3-Next and Qwen3.5."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from math import log2
from typing import ClassVar

from meshscope.events.enums import Kind
from meshscope.model.arrays import (
    LAYER_BASE,
    CacheArray,
    ColumnSlice,
    Dim,
    Weight,
    WeightBuilder,
    letters,
)
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms import attention as base
from meshscope.model.mechanisms.attention import AttentionStep, ContextExchange
from meshscope.model.reader import ConfigReader, refuse

LINEAR_CHUNK = 64  # positions of a prompt that linear attention computes at once; a power of two
# Products in the precision HIGHEST of JAX: three bfloat16 parts of each factor, and the six largest products of
# parts ("bfloat16_6x" of `jax.default_matmul_precision` in JAX's documentation).
FLOAT32_PASSES = 6
F32_BYTES = 4
# Float32 arrays in prefill: queries, keys, values and outputs, each of them as the layer has it and as the loop over
# chunks reads or writes it.
N_CHUNKED = 2


class Recurrent(base.LayerAttention):
    """What keeps a state of fixed size for each head, and the last inputs of a causal convolution."""

    __slots__ = ()
    conv_width: int  # positions of the convolution

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        """Heads, and channels of a head, of what passes the convolution, by name."""

    @property
    @abstractmethod
    def state(self) -> tuple[int, int, int]:
        """Heads that have a state, and the channels of its keys and of its values."""

    @property
    def n_channels(self) -> int:
        """Channels that pass the convolution."""
        return sum(n * width for n, width in self.sizes.values())

    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        """The state of each head, and the last inputs of the convolution.

        Both are float32: the state adds up all positions. A step of several tokens keeps the state after each
        and as many more inputs; the next step starts from the last accepted token's, as in vLLM
        (vllm/model_executor/layers/mamba/mamba_utils.py: k + 1 states, conv_kernel - 1 + num_spec inputs).
        """
        n_heads, n_keys, n_values = self.state
        shapes = {"state": ((n_heads, n_values), n_tokens * n_keys)}
        n_inputs = self.conv_width - 1 + n_tokens - 1
        shapes |= {f"conv_{name}": (size, n_inputs) for name, size in self.sizes.items()}
        for name, (shape, n_slots) in shapes.items():
            dims = (Dim.HEADS, Dim.HEAD_DIM)
            yield CacheArray(name=name, dims=dims, shape=shape, n_fixed_slots=n_slots, dtype="f32")

    def over_cp(self, kind: AttentionKind, step: AttentionStep) -> Iterator[ContextExchange]:
        """In prefill: the last inputs of the convolution in each block, then what it does to the state."""
        if not step.is_prefill:
            return
        n_last = min(self.conv_width - 1, step.n_local)
        tails = (step.n_sequences, step.cp * n_last, self.n_channels // step.tp)
        blocks = (step.n_sequences, step.cp * self.state[0] // step.tp, *self.of_block)
        yield ContextExchange(Kind.ALL_GATHER, tails)
        yield ContextExchange(Kind.ALL_GATHER, blocks, "f32")

    @property
    @abstractmethod
    def of_block(self) -> tuple[int, int]:
        """The array of a head that says what a block of positions does to its state."""

    def passed_elements(self, tp: int, *, is_prefill: bool, is_served: bool) -> float:
        """What passes the convolution and the gate of the output, rotated or convolved, and normed."""
        n_heads, _, n_values = self.state
        return (base.HEAD_PASSES + base.NORM_PASSES) * (self.n_channels + n_heads * n_values) / tp


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention(Recurrent):
    """Gated delta rule (arXiv 2412.06464): each value head keeps a state [key_dim, value_dim] for a sequence."""

    mechanism = base.Mechanism.LINEAR
    n_small_ops = 20  # assumed: the same as grouped attention
    copied_stacks: ClassVar[frozenset[str]] = frozenset({"wq", "wk", "wv", "wz"})
    chunk: ClassVar[int] = LINEAR_CHUNK

    n_key_heads: int  # each serves n_value_heads / n_key_heads value heads
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # positions of a causal convolution of queries, keys and values
    has_sigmoid_gate: bool = False  # outputs have one instead of SiLU

    @property
    def group(self) -> int:
        """Value heads that a key head serves."""
        return self.n_value_heads // self.n_key_heads

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        keys = (self.n_key_heads, self.key_dim)
        return {"q": keys, "k": keys, "v": (self.n_value_heads, self.value_dim)}

    @property
    def state(self) -> tuple[int, int, int]:
        return self.n_value_heads, self.key_dim, self.value_dim

    @property
    def of_block(self) -> tuple[int, int]:
        """A map of the state: a matrix, and an addend."""
        return self.key_dim, self.key_dim + self.value_dim

    @classmethod
    def read(cls, reader: ConfigReader) -> "LinearAttention":
        """The sizes in a config, with the defaults of Qwen3NextConfig and Qwen3_5TextConfig."""
        gate = reader.text("output_gate_type", "silu")
        known = f"output_gate_type='{gate}' is not supported, only 'silu' or 'sigmoid'"
        refuse(reader.source, {known: gate not in {"silu", "swish", "sigmoid"}})
        return cls(
            n_key_heads=reader.integer("linear_num_key_heads", 16),
            n_value_heads=reader.integer("linear_num_value_heads", 32),
            key_dim=reader.integer("linear_key_head_dim", 128),
            value_dim=reader.integer("linear_value_head_dim", 128),
            conv_width=reader.integer("linear_conv_kernel_dim", 4, minimum=2),
            has_sigmoid_gate=gate == "sigmoid",
        )

    def check(self, source: str) -> None:
        """Raise SpecError unless key heads serve whole groups of value heads."""
        n_values, n_keys = self.n_value_heads, self.n_key_heads
        keys = f"linear_num_key_heads={n_keys}"
        values = f"linear_num_value_heads={n_values} is not a multiple of {keys}"
        refuse(source, {values: n_values % n_keys > 0})

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """Key heads are split over tp with the value heads that they serve; the convolution has queries, keys, then values."""
        n, k, v, group = self.n_key_heads, self.key_dim, self.value_dim, self.group
        heads = {"N": n, "V": self.n_value_heads, "K": n * k, "W": n * group * v}
        dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.NORM, c=self.conv_width)
        dims |= letters(Dim.HEADS, **heads) | letters(Dim.HEAD_DIM, k=k, v=group * v, g=group, h=v)
        builder = WeightBuilder(f"{LAYER_BASE}linear_attn.", dims)
        # Queries, keys, values, gates, rates b and decays a: by key head together, or (Qwen3.5) one after the other.
        sizes = {"wq": n * k, "wk": n * k, "wv": n * group * v}
        tensors = _columns({"in_proj_qkv": sizes}, is_flat=True)
        tensors |= {f"w{name}": (f"in_proj_{name}.weight", None) for name in "zba"}
        if is_fused:
            sizes = {"wq": k, "wk": k, "wv": group * v, "wz": group * v}
            tensors = _columns({"in_proj_qkvz": sizes, "in_proj_ba": {"wb": group, "wa": group}})
        for name, letter in zip(("wq", "wk", "wv", "wz", "wb", "wa"), "kkvvgg", strict=True):
            tensor, columns = tensors[name]
            inputs = () if letter == "g" else (0,)
            yield builder.matrix(name, f"DN{letter}", tensor, columns=columns, inputs=inputs)
        start = 0
        for name, letter in {"q": "K", "k": "K", "v": "W"}.items():
            stop = start + heads[letter]
            columns = ColumnSlice(whole=self.n_channels, start=start, stop=stop, dim=-2)
            yield builder.vector(f"conv_{name}", f"{letter}c", "conv1d.weight", columns=columns)
            start = stop
        yield builder.vector("decay_log", "V", "A_log")
        yield builder.vector("decay_bias", "V", "dt_bias")
        yield builder.vector("state_norm", "h", "norm.weight")
        yield builder.matrix("wo", "VhD", "out_proj.weight", inputs=(0, 1))

    def step_bytes(self, step: AttentionStep) -> float:
        """Inputs of the convolution and gates, and the float32 arrays of all value heads; under cp also columns and maps."""
        keys, values = (self.n_value_heads * width for width in (self.key_dim, self.value_dim))
        is_split = step.cp > 1 and step.is_prefill
        chunked = N_CHUNKED * (2 * (keys + values) + keys * is_split)
        of_token = (self.n_channels + values) * step.act_bytes + chunked * F32_BYTES
        maps = (step.cp + 1) * self.key_dim * (keys + values) * is_split * F32_BYTES
        return (step.n_tokens * of_token + step.n_sequences * maps) / step.tp

    def flops(self, kind: AttentionKind, n: int) -> float:
        """FLOPs of `n` tokens: the key's and the query's product with the state, its update, the convolution."""
        state = 6.0 * self.n_value_heads * self.key_dim * self.value_dim
        return n * (state + 2.0 * self.conv_width * self.n_channels)

    @property
    def chunked_flops(self) -> float:
        """FLOPs of one token of a prompt in chunks, all heads: products with the state and within the chunk.

        A chunk multiplies its keys and its queries with its keys, inverts a triangle by blocks that double, with two
        products of whole matrices for each size beyond one, multiplies the inverse with values and keys, and weights
        the values.
        """
        k, v, chunk = self.key_dim, self.value_dim, self.chunk
        inverse = 4.0 * chunk**2 * (log2(chunk) - 1)
        within = chunk * (4.0 * k + 2.0 * (k + v) + 2.0 * v) + inverse
        convolution = 2.0 * self.conv_width * self.n_channels
        return self.n_value_heads * (6.0 * k * v + within) + convolution

    def prompt_work(self, kind: AttentionKind, n_blocks: int) -> base.PromptWork:
        """The rule in chunks; under cp also how a block maps the state, and the states before the blocks.

        The state then has one more column per key channel, outputs add the state before the block and are written
        and read once more, in float32, and each sequence takes its state through all blocks.
        """
        if n_blocks == 1:
            return base.PromptWork(token_flops=self.chunked_flops)
        k, v = self.key_dim, self.value_dim
        of_token = 6.0 * k * k + 2.0 * self.chunk * k + 2.0 * k * v
        passed_on = n_blocks * self.n_value_heads * 2.0 * k**2 * v
        return base.PromptWork(
            token_flops=self.chunked_flops,
            split_flops=self.n_value_heads * of_token,
            sequence_flops=FLOAT32_PASSES * passed_on,
            token_f32=2 * self.n_value_heads * k,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramLinearAttention(LinearAttention):
    """Linear attention after rows of a table enter the streams (Qwen3.8), with a convolution over positions.

    Each stream adds the value of the rows times its gate, and the convolution of the norm of that. Source:
    Qwen4ExpTextPLELayer of transformers.
    """

    n_streams: int
    hidden: int
    row_width: int  # channels of the rows of a token
    taps: int  # the convolution reads so many positions, `dilation` apart
    dilation: int

    @classmethod
    def of_config(
        cls, linear: object, reader: ConfigReader, n_streams: int
    ) -> "NGramLinearAttention":
        """The same linear attention, with the defaults of Qwen4ExpTextConfig."""
        assert isinstance(linear, LinearAttention)
        hidden = reader.integer("hidden_size")
        return cls(
            **{field.name: getattr(linear, field.name) for field in fields(linear)},
            n_streams=n_streams,
            hidden=hidden,
            row_width=reader.integer("ple_embed_dim", hidden),
            taps=reader.integer("ple_conv_kernel_size", 4),
            dilation=reader.integer("ngram_size", 3),
        )

    @property
    def n_before(self) -> int:
        """Earlier positions that the convolution reads."""
        return (self.taps - 1) * self.dilation

    @property
    def n_stream_channels(self) -> int:
        """Channels of all streams."""
        return self.n_streams * self.hidden

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """As linear attention; what takes rows in is replicated."""
        yield from LinearAttention.weights(self, hidden, tp, layer, is_fused=is_fused)
        dims = letters(Dim.HIDDEN, W=self.row_width) | letters(Dim.NORM, t=self.taps)
        dims |= letters(Dim.NORM, d=hidden, s=self.n_stream_channels)
        builder = WeightBuilder(f"{LAYER_BASE}ple.", dims)
        yield builder.matrix("ngram_wk", "Ws", "key_proj.weight")
        yield builder.matrix("ngram_wv", "Wd", "value_proj.weight")
        for name, tensor in {"k": "key", "q": "query", "conv": "conv"}.items():
            yield builder.vector(f"ngram_{name}_norm", "s", f"norm_{tensor}.weight")
        yield builder.vector("ngram_conv", "st", "conv1d.weight")

    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        """As linear attention, with the last inputs of the convolution of all streams."""
        yield from LinearAttention.cache(self, kind, tp, n_tokens)
        dims, shape = (Dim.NORM, Dim.NORM), (self.n_streams, self.hidden)
        n_slots = self.n_before + n_tokens - 1
        yield CacheArray(
            name="conv_ngram", dims=dims, shape=shape, n_fixed_slots=n_slots, dtype="f32"
        )

    def over_cp(self, kind: AttentionKind, step: AttentionStep) -> Iterator[ContextExchange]:
        """In prefill, the last inputs of the convolution in each block; then as linear attention."""
        if step.is_prefill:
            n_last = min(self.n_before, step.n_local)
            tails = (step.n_sequences, step.cp * n_last, self.n_stream_channels)
            yield ContextExchange(Kind.ALL_GATHER, tails)
        yield from LinearAttention.over_cp(self, kind, step)

    def flops(self, kind: AttentionKind, n: int) -> float:
        """As linear attention, with the convolution of all streams and their gates."""
        of_streams = 2.0 * (self.taps + 1) * self.n_stream_channels
        return LinearAttention.flops(self, kind, n) + n * of_streams


def _columns(
    tensors: Mapping[str, Mapping[str, int]], *, is_flat: bool = False
) -> dict[str, tuple[str, ColumnSlice | None]]:
    columns: dict[str, tuple[str, ColumnSlice | None]] = {}
    for tensor, sizes in tensors.items():
        stops, whole = accumulate(sizes.values()), sum(sizes.values())
        for (name, size), stop in zip(sizes.items(), stops, strict=True):
            part = ColumnSlice(whole=whole, start=stop - size, stop=stop, is_flat=is_flat)
            columns[name] = (f"{tensor}.weight", part)
    return columns


linear_of = partial(base.narrowed, kind=LinearAttention)
