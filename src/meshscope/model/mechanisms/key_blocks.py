"""Grouped-query attention to blocks of keys that an indexer chooses for each KV head (MiniMax-M3)."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from meshscope.events.enums import Kind
from meshscope.model.arrays import LANES, CacheArray, Dim, Weight, WeightBuilder, letters
from meshscope.model.families import Family
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms import attention as base
from meshscope.model.mechanisms.attention import AttentionStep, ContextExchange
from meshscope.model.mechanisms.grouped import BASE, GroupedAttention, grouped_attention
from meshscope.model.reader import ConfigReader, refuse

CONFIG = "sparse_attention_config"
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
        n, width, turned = (
            self.indexer.n_heads,
            self.indexer.head_dim,
            self.rope.rotary_dim(self.head_dim),
        )
        problems = {
            f"{n} heads of the indexer are not num_key_value_heads={self.n_kv_heads}": n
            != self.n_kv_heads,
            f"the width {width} of the indexer is smaller than the {turned} rotated channels": width
            < turned,
            f"{self.n_local_blocks} local blocks exceed the {self.indexer.top_k} chosen ones": self.n_local_blocks
            > self.indexer.top_k,
        }
        refuse(source, problems)

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """As grouped attention; the indexer's queries are split or replicated as KV heads are."""
        yield from GroupedAttention.weights(self, hidden, tp, layer, is_fused=is_fused)
        if layer.attention is AttentionKind.KEY_BLOCKS:
            dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.KV_HEADS, K=self.stored_kv_heads(tp))
            dims |= letters(Dim.HEAD_DIM, h=self.indexer.head_dim)
            dims |= letters(Dim.NORM, i=self.indexer.head_dim)
            builder = WeightBuilder(BASE, dims)
            yield builder.matrix("index_wq", "DKh", "index_q_proj.weight")
            yield builder.matrix("index_wk", "Di", "index_k_proj.weight")
            yield builder.vector("index_q_norm", "i", "index_q_norm.weight")
            yield builder.vector("index_k_norm", "i", "index_k_norm.weight")

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
        n_before = self.chosen_positions - self.block
        n_blocks, rest = divmod(n - self.chosen_positions, self.block)
        of_blocks = n_blocks * base.seen_pairs(self.block) + base.seen_pairs(rest)
        n_late = n - self.chosen_positions
        return base.seen_pairs(self.chosen_positions) + n_late * n_before + of_blocks

    def prompt_work(self, kind: AttentionKind, n_blocks: int) -> base.PromptWork:
        """Plain attention computes all pairs; the indexer's heads add their products and scores."""
        n = self.indexer.n_heads * (kind is AttentionKind.KEY_BLOCKS)
        pair_flops = self.pair_flops() + 2.0 * n * self.indexer.head_dim
        return base.PromptWork(pair_flops=pair_flops, pair_scores=self.n_heads + n)

    def why_whole_prompts(self, name: str) -> str | None:
        """The indexer scores whole prompts under cp."""
        return f"under cp, the indexer of {name} needs the scores of a whole prompt"


def key_block_attention(reader: ConfigReader, family: Family) -> KeyBlockAttention:
    """The attention of MiniMax-M3, whose indexer has keys of its own in transformers and an object in its config.json."""
    attention = grouped_attention(reader, family)
    of = ConfigReader(reader.mapping(CONFIG), reader.source)
    sizes = {
        old: of.integer(old, reader.integer(new, usual))
        for old, new, usual in (
            ("sparse_num_index_heads", "index_n_heads", 4),
            ("sparse_index_dim", "index_head_dim", 128),
            ("sparse_topk_blocks", "index_topk_blocks", 16),
            ("sparse_block_size", "index_block_size", 128),
        )
    }
    n_local = of.count("sparse_local_block", reader.count("index_local_blocks", 1))
    fixed = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
    for key, value in fixed.items():
        wrong = f"{CONFIG}.{key}={of.get(key)!r} is not supported, only {value!r}"
        refuse(reader.source, {wrong: of.get(key) not in {None, value}})
    has_values = "the indexer has values: sparse_disable_index_value is 0 in a sparse layer"
    pairs = zip(
        of.integers("sparse_attention_freq"),
        of.integers("sparse_disable_index_value"),
        strict=False,
    )
    refuse(reader.source, {has_values: any(sparse and not off for sparse, off in pairs)})
    reader.used |= {f"{CONFIG}.{key}" for key in of.used}
    n_heads, width, top_k, block = sizes.values()
    return KeyBlockAttention(
        **{field.name: getattr(attention, field.name) for field in fields(attention)},
        indexer=base.Indexer(n_heads=n_heads, head_dim=width, top_k=top_k, has_weights=False),
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
