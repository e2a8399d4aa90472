"""Grouped-query attention to blocks of keys that an indexer chooses, for each KV head (MiniMax-M3) or all (Qwen3.8)."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from meshscope.events.enums import Kind
from meshscope.model.arrays import (
    LANES,
    CacheArray,
    ColumnSlice,
    Dim,
    Weight,
    WeightBuilder,
    letters,
)
from meshscope.model.families import Family
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms import attention as base
from meshscope.model.mechanisms.attention import AttentionStep, ContextExchange
from meshscope.model.mechanisms.grouped import (
    BASE,
    FULL,
    LINEAR,
    GroupedAttention,
    grouped_attention,
)
from meshscope.model.mechanisms.linear import NGramLinearAttention
from meshscope.model.mechanisms.streams import read_streams
from meshscope.model.reader import ConfigReader, refuse

CONFIG = "sparse_attention_config"
# Sizes in this object and as transformers names them, with the defaults of MiniMaxM3VLTextConfig.
SIZES = (
    *(("num_index_heads", "n_heads", 4), ("index_dim", "head_dim", 128)),
    *(("topk_blocks", "topk_blocks", 16), ("block_size", "block_size", 128)),
    ("local_block", "local_blocks", 1),
)
KINDS = {"full_attention": AttentionKind.FULL, "minimax_m3_sparse": AttentionKind.KEY_BLOCKS}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlockAttention(GroupedAttention):
    """Grouped attention whose sparse layers see `top_k` blocks of keys, the last `n_local_blocks` among them.

    The indexer has a head for each KV head, and one key for all; a block has its largest score.
    Source: MiniMaxM3VLIndexer of transformers.
    """

    indexer: base.Indexer  # `top_k` counts blocks
    block: int  # positions
    n_local_blocks: int

    def check(self, source: str) -> None:
        """Raise SpecError unless each KV head has a head of the indexer, whose width has room for the rotated part."""
        GroupedAttention.check(self, source)
        of, turned = self.indexer, self.rope.rotary_dim(self.head_dim)
        heads = f"{of.n_heads} heads of the indexer are not num_key_value_heads={self.n_kv_heads}"
        narrow = f"the indexer's width {of.head_dim} is less than the {turned} rotated channels"
        is_narrow, has_others = of.head_dim < turned, of.n_heads != self.n_kv_heads
        refuse(source, {heads: has_others, narrow: is_narrow})

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """As grouped attention; the indexer's queries are split or replicated as KV heads are."""
        yield from GroupedAttention.weights(self, hidden, tp, layer, is_fused=is_fused)
        if layer.attention is AttentionKind.KEY_BLOCKS:
            dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.KV_HEADS, K=self.stored_kv_heads(tp))
            dims |= letters(Dim.NORM, i=self.indexer.head_dim)
            builder = WeightBuilder(BASE, dims)
            for name, shape in {"q": "DKi", "k": "Di"}.items():
                yield builder.matrix(f"index_w{name}", shape, f"index_{name}_proj.weight")
                yield builder.vector(f"index_{name}_norm", "i", f"index_{name}_norm.weight")

    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        """Keys and values of every position, and its key of the indexer."""
        yield from GroupedAttention.cache(self, kind, tp, n_tokens)
        if kind is AttentionKind.KEY_BLOCKS:
            yield CacheArray(name="index_k", dims=(Dim.NORM,), shape=(self.indexer.head_dim,))

    def page_elements(
        self, kind: AttentionKind, tp: int, packing: int, *, has_half_rows: bool
    ) -> int:
        n = GroupedAttention.page_elements(self, kind, tp, packing, has_half_rows=has_half_rows)
        return n + base.aligned(self.indexer.head_dim, LANES) * (kind is AttentionKind.KEY_BLOCKS)

    def over_cp(self, kind: AttentionKind, step: AttentionStep) -> base.Exchanges:
        """The keys of the indexer of a prompt, or the largest scores [b,K,s,blocks] in decode; then as grouped attention."""
        if kind is AttentionKind.KEY_BLOCKS:
            n, width = step.n_sequences, self.indexer.head_dim
            if step.is_prefill:
                yield base.gather_over_cp((n, step.n_positions, 1, width))
            else:
                n_heads = self.stored_kv_heads(step.tp) // step.tp
                shape = (n, n_heads, step.n_positions, -(-step.n_slots * step.cp // self.block))
                yield ContextExchange(Kind.ALL_REDUCE, shape, "f32")
        yield from GroupedAttention.over_cp(self, AttentionKind.FULL, step)

    def chosen_by(self, kind: AttentionKind) -> tuple[base.Indexer, int] | None:
        """The indexer, which scores every position."""
        return (self.indexer, 1) if kind is AttentionKind.KEY_BLOCKS else None

    @property
    def chosen_positions(self) -> int:
        return self.indexer.top_k * self.block

    def attended_pairs(self, kind: AttentionKind, n: int) -> int:
        """The chosen blocks are whole but for that of the query."""
        if kind is not AttentionKind.KEY_BLOCKS or n <= self.chosen_positions:
            return base.seen_pairs(n)
        n_blocks, rest = divmod(n - self.chosen_positions, self.block)
        before = (n - self.chosen_positions) * (self.chosen_positions - self.block)
        within = n_blocks * base.seen_pairs(self.block) + base.seen_pairs(rest)
        return base.seen_pairs(self.chosen_positions) + before + within

    def flops(self, kind: AttentionKind, n: int) -> float:
        """The heads of the indexer have no weights: each chooses for itself."""
        n_index = self.indexer.n_heads * (kind is AttentionKind.KEY_BLOCKS)
        of_index = 2.0 * n_index * self.indexer.head_dim * base.seen_pairs(n)
        return self.pair_flops() * self.attended_pairs(kind, n) + of_index

    def prompt_work(self, kind: AttentionKind, n_blocks: int) -> base.PromptWork:
        """Plain attention computes all pairs; the indexer's heads add their products and scores."""
        n = self.indexer.n_heads * (kind is AttentionKind.KEY_BLOCKS)
        pair_flops = self.pair_flops() + 2.0 * n * self.indexer.head_dim
        return base.PromptWork(pair_flops=pair_flops, pair_scores=self.n_heads + n)

    def why_whole_prompts(self, name: str) -> str | None:
        """The indexer scores whole prompts under cp."""
        return f"under cp, the indexer of {name} needs the scores of a whole prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledKeyAttention(KeyBlockAttention):
    """Grouped attention to `top_k` blocks of keys and to the last positions, which no whole block has (Qwen3.8).

    A block has the mean of its keys of the indexer, which all KV heads share. Source: Qwen4ExpTextQSAIndexer of
    transformers.
    """

    ngram_linear: NGramLinearAttention | None = None  # of layers behind tables of n-grams

    def of(self, kind: AttentionKind) -> base.LayerAttention:
        """The attention of layers of this kind, which may be linear."""
        if kind is AttentionKind.NGRAM_LINEAR:
            assert self.ngram_linear is not None
            return self.ngram_linear
        return GroupedAttention.of(self, kind)

    def check(self, source: str) -> None:
        """Raise SpecError unless the indexer has room for the rotated part."""
        GroupedAttention.check(self, source)
        turned, width = self.rope.rotary_dim(self.head_dim), self.indexer.head_dim
        narrow = f"indexer_head_dim={width} is less than the {turned} rotated channels"
        refuse(source, {narrow: width < turned})

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """As grouped attention; the indexer is replicated."""
        yield from GroupedAttention.weights(self, hidden, tp, layer, is_fused=is_fused)
        n, width = self.indexer.n_heads, self.indexer.head_dim
        dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.NORM, n=n, i=width)
        builder, whole = WeightBuilder(f"{BASE}indexer.", dims), (n + 1) * width
        parts = {"q": ("Dni", 0, n * width), "k": ("Di", n * width, whole)}
        for name, (shape, start, stop) in parts.items():
            columns = ColumnSlice(whole=whole, start=start, stop=stop, is_flat=True)
            tensor = "index_qk_proj.weight"
            yield builder.matrix(f"index_w{name}", shape, tensor, columns=columns)
            yield builder.vector(f"index_{name}_norm", "i", f"{name}_layernorm.weight")

    def over_cp(self, kind: AttentionKind, step: AttentionStep) -> base.Exchanges:
        """The keys of the indexer of a prompt, or its means [b,blocks,width] in decode; then as grouped attention."""
        if step.is_prefill:
            yield from KeyBlockAttention.over_cp(self, kind, step)
            return
        n_blocks = -(-step.n_slots * step.cp // self.block)
        shape = (step.n_sequences, n_blocks, self.indexer.head_dim)
        yield ContextExchange(Kind.ALL_REDUCE, shape, "f32")
        yield from GroupedAttention.over_cp(self, AttentionKind.FULL, step)

    def chosen_by(self, kind: AttentionKind) -> tuple[base.Indexer, int] | None:
        """The indexer, which scores blocks."""
        return (self.indexer, self.block) if kind is AttentionKind.KEY_BLOCKS else None

    def attended_pairs(self, kind: AttentionKind, n: int) -> int:
        """The chosen blocks are whole, and each query also sees the positions after the last whole block."""
        beyond = n - self.chosen_positions
        if beyond <= 0:
            return base.seen_pairs(n)
        n_blocks, rest = divmod(beyond, self.block)
        after = n_blocks * base.seen_pairs(self.block - 1) + base.seen_pairs(rest)
        return base.seen_pairs(self.chosen_positions) + beyond * self.chosen_positions + after

    def flops(self, kind: AttentionKind, n: int) -> float:
        """As grouped attention to the chosen pairs, and the indexer's heads with each mean."""
        width = self.indexer.n_heads * self.indexer.head_dim
        of_index = 2.0 * width * base.seen_pairs(n, rate=self.block)
        return self.pair_flops() * self.attended_pairs(kind, n) + of_index

    def prompt_work(self, kind: AttentionKind, n_blocks: int) -> base.PromptWork:
        """Plain attention computes all pairs; the indexer's heads add products and scores of each mean."""
        n = self.indexer.n_heads / self.block
        pair_flops = self.pair_flops() + 2.0 * n * self.indexer.head_dim
        return base.PromptWork(pair_flops=pair_flops, pair_scores=self.n_heads + n)


def pooled_key_attention(reader: ConfigReader, family: Family) -> PooledKeyAttention:
    """The attention of Qwen3.8, whose indexer's sizes have no defaults."""
    attention = grouped_attention(reader, family)
    n_heads, width, budget, block = (
        reader.integer(f"indexer_{key}")
        for key in ("n_heads", "head_dim", "budget", "compress_ratio")
    )
    n_keys = reader.integer("indexer_kv_heads", 1)
    problems = {
        f"indexer_kv_heads={n_keys} is not supported, only 1": n_keys != 1,
        f"indexer_budget={budget} is not a multiple of indexer_compress_ratio={block}": (
            budget % block > 0
        ),
    }
    refuse(reader.source, problems)
    ngram_linear, streams = None, read_streams(reader, "gated")
    if streams is not None and reader.integers("ple_layer_ids"):
        ngram_linear = NGramLinearAttention.of_config(attention.linear, reader, streams.n_streams)
    return PooledKeyAttention(
        **{field.name: getattr(attention, field.name) for field in fields(attention)},
        indexer=base.Indexer(n_heads=n_heads, head_dim=width, top_k=budget // block),
        block=block,
        n_local_blocks=1,
        ngram_linear=ngram_linear,
    )


def pooled_key_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    """The attention of each layer: linear but in every fourth one, and behind a table in those of `ple_layer_ids`."""
    every, blocks = reader.integer("full_attention_interval", 4), AttentionKind.KEY_BLOCKS
    known = dict.fromkeys((FULL, "indexed_attention"), blocks) | {LINEAR: AttentionKind.LINEAR}
    default = [LINEAR if (at + 1) % every else FULL for at in range(n_layers)]
    kinds = [known[name] for name in reader.names("layer_types", n_layers, known, default)]
    for at in (number - 1 for number in reader.integers("ple_layer_ids")):
        is_linear = 0 <= at < n_layers and kinds[at].is_linear
        wrong = f"'ple_layer_ids' has {at + 1}, which is no layer with linear attention"
        refuse(reader.source, {wrong: not is_linear})
        kinds[at] = AttentionKind.NGRAM_LINEAR
    return kinds


def key_block_attention(reader: ConfigReader, family: Family) -> KeyBlockAttention:
    """The attention of MiniMax-M3, whose indexer has keys of its own in transformers and an object in its config.json."""
    attention = grouped_attention(reader, family)
    of = ConfigReader(reader.mapping(CONFIG), reader.source)
    n_heads, width, top_k, block, n_local = (
        of.integer(f"sparse_{old}", reader.integer(f"index_{new}", usual))
        for old, new, usual in SIZES
    )
    fixed = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
    for key, value in fixed.items():
        wrong = f"{CONFIG}.{key}={of.get(key)!r} is not supported, only {value!r}"
        refuse(reader.source, {wrong: of.get(key) not in (None, value)})
    lists = (of.integers(f"sparse_{key}") for key in ("attention_freq", "disable_index_value"))
    has_values = "the indexer has values: sparse_disable_index_value is 0 in a sparse layer"
    is_there = any(sparse and not off for sparse, off in zip(*lists, strict=False))
    refuse(reader.source, {has_values: is_there})
    reader.used |= {f"{CONFIG}.{key}" for key in of.used}
    return KeyBlockAttention(
        **{field.name: getattr(attention, field.name) for field in fields(attention)},
        indexer=base.Indexer(n_heads=n_heads, head_dim=width, top_k=top_k),
        block=block,
        n_local_blocks=n_local,
    )


def key_block_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    """The attention of each layer: `layer_types`, or `sparse_attention_freq` in its object; by default full."""
    of = ConfigReader(reader.mapping(CONFIG), reader.source)
    full, sparse = KINDS
    default = [full] * n_layers
    if of.get("sparse_attention_freq") is not None:
        default = [sparse if one else full for one in of.flags("sparse_attention_freq", n_layers)]
    return [KINDS[name] for name in reader.names("layer_types", n_layers, KINDS, default)]
