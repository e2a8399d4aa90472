"""Attention over a window and compressed entries of earlier positions (DeepSeek-V4), with its kinds of layers.

Defaults and older config keys come from transformers' DeepseekV4Config.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any, ClassVar

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.model.arrays import CacheArray, Dim, Weight, WeightBuilder, letters
from meshscope.model.families import Family
from meshscope.model.layers import AttentionKind, Layer, MlpKind
from meshscope.model.mechanisms import attention as base
from meshscope.model.mechanisms.attention import AttentionStep, ContextExchange
from meshscope.model.reader import ConfigReader, Rope, RopeType, read_rope, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class OneKeyAttention(base.Attention):
    """Attention over a window plus entries of earlier positions, with one key for all heads, which is also the value."""

    n_small_ops = 30  # assumed: the same as latent attention
    kv_norm: ClassVar[str] = "norm.weight"  # the tensor of the norm of keys
    sink_dtype: ClassVar[str | None] = None

    n_heads: int
    q_rank: int
    head_dim: int
    rope_dim: int
    window: int
    n_groups: int  # of heads in the output projection
    group_rank: int  # of a group
    rope: Rope  # of window-only layers
    compressed_rope: Rope  # of the others
    indexer: base.Indexer

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    def check(self, source: str) -> None:
        """Raise SpecError unless rotated parts fit into heads, and heads fill groups."""
        n, narrowest = self.rope_dim, min(self.head_dim, self.indexer.head_dim)
        heads = f"num_attention_heads={self.n_heads} is not a multiple of o_groups={self.n_groups}"
        rotated = f"qk_rope_head_dim={n} must be even and at most {narrowest}, the smaller of head_dim and"
        problems = {f"{rotated} index_head_dim": n > narrowest or n % 2 == 1}
        refuse(source, problems | {heads: self.n_heads % self.n_groups > 0})

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """Heads and output groups are split over tp; the other weights are replicated."""
        d, h, q = hidden, self.head_dim, self.q_rank
        width = self.n_heads // self.n_groups * h  # of a group's heads
        dims = letters(Dim.HIDDEN, D=d, Q=q, W=width) | letters(Dim.NORM, q=q, h=h)
        dims |= letters(Dim.HEADS, N=self.n_heads) | letters(Dim.HEAD_DIM, H=h, r=self.group_rank)
        dims |= letters(Dim.GROUPS, G=self.n_groups)
        builder = WeightBuilder(BASE, dims)
        yield builder.matrix("wq_a", "Dq", "wq_a.weight")
        yield builder.vector("q_a_norm", "q", "q_norm.weight")
        yield builder.matrix("wq_b", "QNH", "wq_b.weight")
        yield builder.matrix("wkv", "Dh", "wkv.weight")
        yield builder.vector("kv_norm", "h", self.kv_norm)
        yield replace(builder.vector("sinks", "N", "attn_sink"), dtype=self.sink_dtype)
        yield from self.entry_weights(d, layer.attention)
        yield builder.matrix("wo_a", "WGr", "wo_a.weight")
        yield builder.matrix("wo_b", "GrD", "wo_b.weight", inputs=(0, 1))

    @abstractmethod
    def entry_weights(self, d: int, kind: AttentionKind) -> Iterator[Weight]:
        """The weights that make entries and choose among them, in layers of this kind."""

    def score_keys(self, step: AttentionStep) -> float:
        """Keys of a query in a layer that chooses, masked ones included: all of a prompt, or a chunk and a window before it."""
        n_window = step.n_positions + self.window * step.is_cut
        return n_window + step.n_prompt / self.chosen_rate

    def step_bytes(self, step: AttentionStep) -> float:
        """Queries and outputs of the tokens."""
        return 2 * step.n_tokens * (self.n_heads / step.tp) * self.head_dim * step.act_bytes

    def passed_elements(self, tp: int, *, is_prefill: bool, is_served: bool) -> float:
        """Queries of all heads."""
        return base.HEAD_PASSES * (self.n_heads / tp) * self.head_dim

    @property
    def chosen_positions(self) -> int:
        return self.indexer.top_k * self.chosen_rate

    @property
    def tp_sizes(self) -> Mapping[str, int]:
        return {"n_heads": self.n_heads, "o_groups": self.n_groups}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention(OneKeyAttention):
    """Attention over a window plus compressed entries of earlier positions (DeepSeek-V4).

    A `compressed_sparse` layer compresses every `sparse_rate` positions (overlapping the previous ones) into an
    entry and attends to the entries selected by the indexer. A `heavily_compressed` layer attends to all entries,
    of `heavy_rate` positions each.
    """

    mechanism = base.Mechanism.COMPRESSED
    why_no_ring = "compressed attention gathers its entries"

    sparse_rate: int
    heavy_rate: int

    def entry_rate(self, kind: AttentionKind) -> int:
        return self.heavy_rate if kind is AttentionKind.HEAVILY_COMPRESSED else self.sparse_rate

    def entry_weights(self, d: int, kind: AttentionKind) -> Iterator[Weight]:
        if kind in _COMPRESSED:
            yield from self._pooled_weights("entry_", "compressor.", d, kind)
        if kind is AttentionKind.COMPRESSED_SPARSE:
            yield from self._pooled_weights("index_", "indexer.compressor.", d, kind)
            yield from base.index_projections(d, self.q_rank, self.indexer, f"{BASE}indexer.")

    def _widths(self, kind: AttentionKind, name: str) -> tuple[int, int]:
        """Widths of an entry and of the positions it compresses; sparse entries overlap the previous ones."""
        width = self.indexer.head_dim if name.startswith("index") else self.head_dim
        return width, width * (2 if kind is AttentionKind.COMPRESSED_SPARSE else 1)

    def _pooled_weights(
        self, prefix: str, start: str, d: int, kind: AttentionKind
    ) -> Iterator[Weight]:
        entry_width, width = self._widths(kind, prefix)
        sizes = letters(Dim.NORM, e=entry_width, p=width, r=self.entry_rate(kind))
        builder = WeightBuilder(BASE + start, letters(Dim.HIDDEN, D=d) | sizes)
        for name in ("wkv", "wgate"):  # in bf16, without scales, in DeepSeek-V4's checkpoints
            yield builder.matrix(f"{prefix}{name}", "Dp", f"{name}.weight", inputs=())
        yield builder.vector(f"{prefix}bias", "rp", "ape")
        yield builder.vector(f"{prefix}norm", "e", "norm.weight")

    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        """Keys of the window, compressed entries, and the positions of the entries that a step may change."""
        n_window, dims = self.window + n_tokens - 1, (Dim.NORM,)
        yield CacheArray(name="window", dims=dims, shape=(self.head_dim,), n_fixed_slots=n_window)
        if kind not in _COMPRESSED:
            return
        rate, is_sparse = self.entry_rate(kind), kind is AttentionKind.COMPRESSED_SPARSE
        # Sparse entries include the window before.
        n_open = (base.n_open_windows(rate, n_tokens) + is_sparse) * rate
        for name in ("entry", "index") if is_sparse else ("entry",):
            entry_width, width = self._widths(kind, name)
            position = CacheArray(name=name, dims=dims, shape=(width,), n_fixed_slots=n_open)
            yield CacheArray(name=name, dims=dims, shape=(entry_width,), rate=rate)
            yield replace(position, name=f"{name}_kv")
            yield replace(position, name=f"{name}_gate")

    def shared_prompt(self, kind: AttentionKind, step: AttentionStep) -> Iterator[ContextExchange]:
        """All-gathers: keys of all positions, then all compressed entries.

        If a block is not a whole number of entries, the positions (`kv` and `gate`) are gathered and compressed
        afterwards. If an entry also reads the positions before its own, each block's last ones are gathered as well.
        """
        widths = {array.name: array.shape for array in self.cache(kind, step.tp)}
        rate = self.entry_rate(kind)

        def gather(*shape: int) -> ContextExchange:
            return ContextExchange(Kind.ALL_GATHER, (step.n_sequences, *shape))

        yield gather(step.n_positions, 1, *widths["window"])
        for name in ("entry", "index"):
            if name not in widths:
                continue
            position = widths[f"{name}_kv"]
            if step.n_local % rate:
                yield from [gather(step.n_positions, *position)] * 2
                continue
            if position != widths[name]:
                yield from [gather(step.cp, rate, *position)] * 2
            yield gather(step.n_positions // rate, 1, *widths[name])

    def score_keys(self, step: AttentionStep) -> float:
        if not step.is_prefill:
            return self.window + step.n_keys / self.sparse_rate
        return OneKeyAttention.score_keys(self, step)

    def chosen_by(self, kind: AttentionKind) -> tuple[base.Indexer, int] | None:
        """The indexer of sparse layers."""
        is_sparse = kind is AttentionKind.COMPRESSED_SPARSE
        return (self.indexer, self.sparse_rate) if is_sparse else None

    @property
    def chosen_rate(self) -> int:
        return self.sparse_rate

    def attended_pairs(self, kind: AttentionKind, n: int) -> int:
        most = self.indexer.top_k if kind is AttentionKind.COMPRESSED_SPARSE else None
        is_windowed = kind not in _COMPRESSED
        n_entries = 0 if is_windowed else base.seen_pairs(n, rate=self.entry_rate(kind), most=most)
        return base.seen_pairs(n, most=self.window) + n_entries

    def unused_weights(self, n_prompt: int) -> frozenset[str]:
        """The indexer's query weights if a prompt is shorter than one compressed entry."""
        is_short = n_prompt < self.sparse_rate
        return frozenset({"index_wq", "index_weights"}) if is_short else frozenset()

    @property
    def joint_positions(self) -> int:
        return lcm(self.sparse_rate, self.heavy_rate)

    def why_whole_prompts(self, name: str) -> str | None:
        return f"under cp, {name} compresses the positions of a prompt together"


compressed_of = partial(base.narrowed, kind=CompressedAttention)


BASE = "model.layers.{layer}.attn."
_COMPRESSED = frozenset({AttentionKind.COMPRESSED_SPARSE, AttentionKind.HEAVILY_COMPRESSED})


# Keys of configs.

ROTATED_SHARE = 64 / 512  # rotated fraction of a head if the config has neither fraction nor width
COMPRESSED_THETA = 160_000.0
N_HASH_LAYERS = 3
KINDS = {
    "sliding_attention": AttentionKind.SLIDING,
    "compressed_sparse_attention": AttentionKind.COMPRESSED_SPARSE,
    "heavily_compressed_attention": AttentionKind.HEAVILY_COMPRESSED,
}
KIND_OF_RATIO: dict[int, AttentionKind] = dict(zip((0, 4, 128), KINDS.values(), strict=True))
MLP_KINDS = {"hash_moe": MlpKind.HASH_MOE, "moe": MlpKind.MOE}


def compressed_attention(reader: ConfigReader, family: Family) -> CompressedAttention:
    """The attention parameters of all layers; a layer's kind selects the parts it uses."""
    rates = reader.over(reader.mapping("compress_rates"))  # older configs have separate keys
    sparse = rates.integer("compressed_sparse_attention", 4)
    heavy = rates.integer("heavily_compressed_attention", 128)
    return CompressedAttention(
        **entry_sizes(reader, family),
        sparse_rate=reader.integer("compress_rate_csa", sparse),
        heavy_rate=reader.integer("compress_rate_hca", heavy),
    )


def entry_sizes(reader: ConfigReader, family: Family) -> dict[str, Any]:
    """The fields that `OneKeyAttention` declares."""
    n_kv_heads = reader.integer("num_key_value_heads", 1)
    if n_kv_heads != 1:
        raise SpecError(
            f"{reader.source}: num_key_value_heads={n_kv_heads} must be 1: "
            f"all heads of {family} share one key. Correct the config."
        )
    head_dim, share = reader.integer("head_dim"), reader.optional_number("partial_rotary_factor")
    if share is None:
        width = reader.optional_integer("qk_rope_head_dim")
        share = ROTATED_SHARE if width is None else width / head_dim
    rope, compressed_rope = _ropes(reader)
    return {
        "n_heads": reader.integer("num_attention_heads"),
        "q_rank": reader.integer("q_lora_rank"),
        "head_dim": head_dim,
        "rope_dim": int(head_dim * share),
        "window": reader.integer("sliding_window", 128),
        "n_groups": reader.integer("o_groups", 8),
        "group_rank": reader.integer("o_lora_rank", 1024),
        "rope": rope,
        "compressed_rope": compressed_rope,
        "indexer": base.Indexer(
            n_heads=reader.integer("index_n_heads", 64),
            head_dim=reader.integer("index_head_dim", 128),
            top_k=reader.integer("index_topk", 512),
        ),
    }


def compressed_layers(reader: ConfigReader, n_layers: int) -> tuple[Layer, ...]:
    """The kind of each layer; lists in published configs may be longer than the model."""
    n_hash = reader.count("num_hash_layers", N_HASH_LAYERS)
    default = ["hash_moe"] * min(n_hash, n_layers) + ["moe"] * max(0, n_layers - n_hash)
    mlp = _first(reader, "mlp_layer_types", n_layers).names(
        "mlp_layer_types", n_layers, MLP_KINDS, default
    )
    attention = _attention_kinds(reader, n_layers)
    kinds = zip(attention, mlp, strict=True)
    return tuple(Layer(attention=kind, mlp=MLP_KINDS[name]) for kind, name in kinds)


def _attention_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    if reader.get("layer_types") is None and reader.get("compress_ratios"):
        ratios = reader.integers("compress_ratios")[:n_layers]
        if len(ratios) != n_layers or not KIND_OF_RATIO.keys() >= set(ratios):
            raise SpecError(
                f"{reader.source}: 'compress_ratios' must be 0, 4 or 128 for each of {n_layers} layers, "
                f"got {ratios}. Correct the config, or write 'layer_types'."
            )
        return [KIND_OF_RATIO[ratio] for ratio in ratios]
    _, sparse, heavy = KINDS
    default = [sparse if index > 2 and index % 2 else heavy for index in range(n_layers)]
    names = _first(reader, "layer_types", n_layers).names("layer_types", n_layers, KINDS, default)
    return [KINDS[name] for name in names]


def _first(reader: ConfigReader, key: str, n_layers: int) -> ConfigReader:
    values = reader.get(key)
    if not isinstance(values, list):
        return reader
    return reader.over({**reader.config, key: values[:n_layers]})


def _ropes(reader: ConfigReader) -> tuple[Rope, Rope]:
    """Rotary embeddings of window-only layers and of compressed layers, nested under `main` and `compress`, or flat.

    In a flat config, scaling applies to compressed layers only, and their YaRN does not scale cosine and sine.
    """
    nested = reader.mapping("rope_parameters")

    def rope_of(parameters: Mapping[str, Any]) -> Rope:
        whole = {**reader.config, "rope_scaling": None, "rope_parameters": parameters}
        return replace(read_rope(reader.over(whole)), is_interleaved=True)

    main, compress = nested.get("main"), nested.get("compress")
    if isinstance(main, Mapping) and isinstance(compress, Mapping):
        return rope_of(main), rope_of(compress)
    theta = reader.positive("compress_rope_theta", COMPRESSED_THETA)
    compressed = rope_of({**reader.mapping("rope_scaling"), **nested, "rope_theta": theta})
    if compressed.rope_type is RopeType.YARN and compressed.attention_factor is None:
        compressed = replace(compressed, attention_factor=1.0)
    return rope_of({}), compressed
