"""State spaces: the selective recurrence of Mamba-2 (arXiv 2405.21060), as Nemotron-H has it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from meshscope.model.arrays import (
    LAYER_BASE,
    ColumnSlice,
    Dim,
    Weight,
    WeightBuilder,
    letters,
)
from meshscope.model.layers import AttentionKind, Layer, MlpKind
from meshscope.model.mechanisms import attention as base
from meshscope.model.mechanisms.attention import AttentionStep
from meshscope.model.mechanisms.linear import F32_BYTES, N_CHUNKED, Recurrent
from meshscope.model.reader import ConfigReader, refuse

NO_LIMIT = 1e30  # of the size of a step: configs have infinity or 1e308
STATE_CHUNK = 128  # positions of a prompt that a state space computes at once
PARTS = ("x", "b", "c")  # that the convolution passes: inputs, and the keys and queries of a state


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace(Recurrent):
    """Mamba-2: each head keeps a state [state_dim, head_dim] for a sequence, which decays by a number for each token."""

    mechanism = base.Mechanism.STATE_SPACE
    n_small_ops = 20  # assumed: the same as grouped attention
    copied_stacks: ClassVar[frozenset[str]] = frozenset({"wz", *(f"w{name}" for name in PARTS)})

    n_heads: int
    head_dim: int
    n_groups: int  # of heads that share keys and queries, and of channels that are normed together
    state_dim: int
    conv_width: int
    has_conv_bias: bool

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.n_heads * self.head_dim

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Heads or groups, and their width, of what passes the convolution, in the order of the checkpoint."""
        keys = (self.n_groups, self.state_dim)
        return dict(zip(PARTS, ((self.n_heads, self.head_dim), keys, keys), strict=True))

    @property
    def state(self) -> tuple[int, int, int]:
        return self.n_heads, self.state_dim, self.head_dim

    @property
    def of_block(self) -> tuple[int, int]:
        """What it adds to a state of zeros, and how that decays in one more row."""
        return self.state_dim + 1, self.head_dim

    @classmethod
    def read(cls, reader: ConfigReader) -> "StateSpace":
        """The sizes in a config, with the defaults of NemotronHConfig; steps must have no limits."""
        limits = reader.get("time_step_limit")
        match limits:
            case None:
                is_open = True
            case [0, float() | int() as last]:
                is_open = last >= NO_LIMIT
            case _:
                is_open = False
        refuse(
            reader.source,
            {f"time_step_limit={limits} is not supported, only 0 to infinity": not is_open},
        )
        return cls(
            n_heads=reader.integer("mamba_num_heads", 128),
            head_dim=reader.integer("mamba_head_dim", 64),
            n_groups=reader.integer("n_groups", 8),
            state_dim=reader.integer("ssm_state_size", 128),
            conv_width=reader.integer("conv_kernel", 4, minimum=2),
            has_conv_bias=reader.boolean("use_conv_bias", default=True),
        )

    def check(self, source: str) -> None:
        """Raise SpecError unless groups have whole heads."""
        n, n_groups = self.n_heads, self.n_groups
        refuse(
            source,
            {f"mamba_num_heads={n} is not a multiple of n_groups={n_groups}": n % n_groups > 0},
        )

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """Heads are split over tp with their groups; one tensor has gates, inputs, keys, queries and steps."""
        heads = {"V": self.n_heads, "G": self.n_groups, "W": self.width}
        heads |= {"K": self.n_groups * self.state_dim}
        dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.NORM, c=self.conv_width)
        dims |= letters(Dim.HEADS, **heads) | letters(
            Dim.HEAD_DIM, h=self.head_dim, k=self.state_dim
        )
        builder = WeightBuilder(f"{LAYER_BASE}mixer.", dims)
        flat, whole, start = {"x": "W", "b": "K", "c": "K"}, self.width + self.n_channels, 0
        for name, shape in {"z": "Vh", "x": "Vh", "b": "Gk", "c": "Gk", "dt": "V"}.items():
            stop = start + heads[{"z": "W", "dt": "V"}.get(name) or flat[name]]
            columns = ColumnSlice(whole=whole + self.n_heads, start=start, stop=stop, is_flat=True)
            inputs = () if name == "dt" else (0,)
            tensor = "in_proj.weight"
            yield builder.matrix(f"w{name}", f"D{shape}", tensor, columns=columns, inputs=inputs)
            start = stop
        start = 0
        for name, letter in flat.items():
            stop = start + heads[letter]
            columns = ColumnSlice(whole=self.n_channels, start=start, stop=stop, dim=-2)
            yield builder.vector(f"conv_{name}", f"{letter}c", "conv1d.weight", columns=columns)
            if self.has_conv_bias:
                columns = ColumnSlice(whole=self.n_channels, start=start, stop=stop)
                yield builder.vector(f"conv_bias_{name}", letter, "conv1d.bias", columns=columns)
            start = stop
        yield builder.vector("decay_log", "V", "A_log")
        yield builder.vector("decay_bias", "V", "dt_bias")
        yield builder.vector("skip", "V", "D")
        yield builder.vector("state_norm", "W", "norm.weight")
        yield builder.matrix("wo", "VhD", "out_proj.weight", inputs=(0, 1))

    def step_bytes(self, step: AttentionStep) -> float:
        """Inputs of the convolution and gates, and the float32 arrays of all heads and groups; under cp also states."""
        of_token = (self.n_channels + self.width) * step.act_bytes
        of_token += N_CHUNKED * (self.n_channels + self.width) * F32_BYTES
        is_split = step.cp > 1 and step.is_prefill
        states = (step.cp + 1) * (self.state_dim + 1) * self.width * is_split * F32_BYTES
        return (step.n_tokens * of_token + step.n_sequences * states) / step.tp

    def flops(self, kind: AttentionKind, n: int) -> float:
        """FLOPs of `n` tokens: the update of the state, the query's product with it, the convolution."""
        return n * (4.0 * self.width * self.state_dim + 2.0 * self.conv_width * self.n_channels)

    def prompt_work(self, kind: AttentionKind, n_blocks: int) -> base.PromptWork:
        """Products with the state and within chunks; under cp, outputs add the state before the block.

        Keys and queries of a group have one product, which each of its heads weights by its decay.
        """
        within = 2.0 * STATE_CHUNK * (self.n_groups * self.state_dim + self.width)
        token_flops = self.flops(kind, 1) + within
        if n_blocks == 1:
            return base.PromptWork(token_flops=token_flops)
        return base.PromptWork(
            token_flops=token_flops,
            split_flops=2.0 * self.width * self.state_dim,
            token_f32=2 * self.width,
        )


state_space_of = partial(base.narrowed, kind=StateSpace)

_STATES = Layer(attention=AttentionKind.LINEAR, mlp=MlpKind.NONE)
_ATTENTION = Layer(attention=AttentionKind.NOPE, mlp=MlpKind.NONE)
_MLP = Layer(attention=AttentionKind.NONE, mlp=MlpKind.DENSE)
_EXPERTS = Layer(attention=AttentionKind.NONE, mlp=MlpKind.MOE)
# Letters of `hybrid_override_pattern`, and names of `layers_block_type`.
BLOCKS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), _STATES),
    **dict.fromkeys(("*", "attention", "full_attention"), _ATTENTION),
    **dict.fromkeys(("-", "mlp"), _MLP),
    **dict.fromkeys(("E", "moe"), _EXPERTS),
}


def block_layers(reader: ConfigReader, most: int) -> tuple[Layer, ...]:
    """The layers of Nemotron-H, each of which is one block."""
    key, stated = "hybrid_override_pattern", reader.get("layers_block_type")
    blocks = stated or reader.get("layer_types") or list(reader.text(key))
    n_layers = reader.integer("num_hidden_layers", len(blocks), maximum=most)
    names = reader.over({key: blocks}).names(key, n_layers, BLOCKS, [])
    return tuple(BLOCKS[name] for name in names)
