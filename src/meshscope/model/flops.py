"""FLOPs of attention: keys per query, products per query-key pair, and the blocks that kernels compute."""

from math import log2
from typing import Any, assert_never

from meshscope.model.model import (
    Attention,
    AttentionKind,
    CompressedAttention,
    GroupedAttention,
    Indexer,
    LatentAttention,
    LinearAttention,
    Model,
)


def attention_flops(attention: Attention, kind: AttentionKind, n: int) -> float:
    """FLOPs of the first `n` queries of a sequence in one layer under a causal mask, all heads, indexer included.

    Two for each multiplication of a query with a key and of a weight with a value, for the keys that a query may
    see: those before it, in its window or chunk, or of the indexer's choice. Linear attention counts the
    recurrence.
    """
    if kind is AttentionKind.LINEAR:
        return n * recurrence_flops(linear_of(attention))
    n_pairs = attended_pairs(attention, kind, n)
    return pair_flops(of_kind(attention, kind)) * n_pairs + _indexer_flops(attention, kind, n)


def of_kind(attention: Attention, kind: AttentionKind) -> Attention:
    """The attention of layers of this kind, whose heads may differ from those of other layers."""
    return attention.of(kind) if isinstance(attention, GroupedAttention) else attention


def has_linear_attention(model: Model) -> bool:
    """Whether any layer has linear attention."""
    return any(layer.attention is AttentionKind.LINEAR for layer in model.layers)


def has_shared_indexers(model: Model) -> bool:
    """Whether any layer takes the positions that the indexer of an earlier layer chose."""
    return any(layer.attention is AttentionKind.SHARED for layer in model.layers)


def linear_of(attention: Attention) -> LinearAttention:
    """The linear attention of a model whose layers have it."""
    assert isinstance(attention, GroupedAttention)
    assert attention.linear is not None
    return attention.linear


def recurrence_flops(linear: LinearAttention) -> float:
    """FLOPs of one token: the key's and the query's product with the state, its update, the convolution."""
    state = 6.0 * linear.n_value_heads * linear.key_dim * linear.value_dim
    return state + 2.0 * linear.conv_width * linear.n_channels


LINEAR_CHUNK = 64  # positions of a prompt that linear attention computes at once; a power of two


def chunked_flops(linear: LinearAttention) -> float:
    """FLOPs of one token of a prompt in chunks, all heads: products with the state and within the chunk.

    A chunk multiplies its keys and its queries with its keys, inverts a triangle by blocks that double, with two
    products of whole matrices for each size beyond one, multiplies the inverse with values and keys, and weights
    the values.
    """
    k, v, chunk = linear.key_dim, linear.value_dim, LINEAR_CHUNK
    inverse = 4.0 * chunk**2 * (log2(chunk) - 1)
    within = chunk * (4.0 * k + 2.0 * (k + v) + 2.0 * v) + inverse
    convolution = 2.0 * linear.conv_width * linear.n_channels
    return linear.n_value_heads * (6.0 * k * v + within) + convolution


# Products in the precision HIGHEST of JAX: three bfloat16 parts of each factor, and the six largest products of
# parts ("bfloat16_6x" of `jax.default_matmul_precision` in JAX's documentation).
FLOAT32_PASSES = 6


def split_flops(linear: LinearAttention) -> float:
    """FLOPs of one token beyond `chunked_flops` if cp splits the prompt, all heads.

    The state has as many more columns as a key has channels, and outputs add the state before the block.
    """
    k, v = linear.key_dim, linear.value_dim
    return linear.n_value_heads * (6.0 * k * k + 2.0 * LINEAR_CHUNK * k + 2.0 * k * v)


def passed_on_flops(linear: LinearAttention, n_blocks: int) -> float:
    """FLOPs of one sequence that take its state through `n_blocks` blocks, all heads."""
    of_block = 2.0 * linear.key_dim**2 * linear.value_dim
    return FLOAT32_PASSES * n_blocks * linear.n_value_heads * of_block


def attended_pairs(attention: Attention, kind: AttentionKind, n: int) -> int:
    """Pairs of the first `n` queries of a sequence with the keys or entries that each attends to."""
    match attention:
        case GroupedAttention():
            window = window_of(attention, kind)
            if window is not None and kind is AttentionKind.CHUNKED:
                n_chunks, rest = divmod(n, window)
                return n_chunks * _seen(window) + _seen(rest)
            return _seen(n, most=window)
        case LatentAttention():
            indexer = attention.indexer
            return _seen(n, most=None if indexer is None else indexer.top_k)
        case CompressedAttention():
            is_sparse = kind is AttentionKind.COMPRESSED_SPARSE
            most = attention.indexer.top_k if is_sparse else None
            n_entries = 0
            if is_sparse or kind is AttentionKind.HEAVILY_COMPRESSED:
                n_entries = _seen(n, rate=entry_rate(attention, kind), most=most)
            return _seen(n, most=attention.window) + n_entries
        case _:
            assert_never(attention)


def _seen(n: int, *, rate: int = 1, most: int | None = None) -> int:
    """The sum of `min(i // rate, most)` for i = 1 to n: entries of `rate` positions that n queries see."""
    n_growing = n if most is None else min(n, most * rate)
    n_whole, rest = divmod(n_growing, rate)
    growing = rate * n_whole * (n_whole - 1) // 2 + n_whole * (rest + 1)
    return growing + (n - n_growing) * (most or 0)


def window_of(attention: Attention, kind: AttentionKind) -> int | None:
    """The sliding window of a layer in positions; None if it attends to the whole context.

    A chunk counts as a window of its size: twice the mean of long sequences.
    """
    kinds = {AttentionKind.SLIDING, AttentionKind.CHUNKED}
    if isinstance(attention, GroupedAttention) and kind in kinds:
        return attention.window
    return None


def entry_rate(attention: CompressedAttention, kind: AttentionKind) -> int:
    """Positions per compressed entry."""
    is_heavy = kind is AttentionKind.HEAVILY_COMPRESSED
    return attention.heavy_rate if is_heavy else attention.sparse_rate


def pair_flops(attention: Attention, *, is_absorbed: bool = False) -> float:
    """FLOPs of one query with one key and its value, all heads.

    `is_absorbed` counts latent attention on the latents themselves, as decode computes it.
    """
    match attention:
        case LatentAttention() if is_absorbed:
            widths = 2 * attention.kv_rank + attention.rope_dim
        case LatentAttention():
            widths = attention.qk_dim + attention.value_dim
        case GroupedAttention() | CompressedAttention():
            widths = 2 * attention.head_dim
        case _:
            assert_never(attention)
    return 2.0 * attention.n_heads * widths


def _indexer_flops(attention: Attention, kind: AttentionKind, n: int) -> float:
    """The indexer's products of `n` queries with the positions or entries they see, and the weighted sums."""
    if kind is AttentionKind.SHARED:
        return 0.0
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        return _scored(attention.indexer, _seen(n))
    if isinstance(attention, CompressedAttention) and kind is AttentionKind.COMPRESSED_SPARSE:
        return _scored(attention.indexer, _seen(n, rate=attention.sparse_rate))
    return 0.0


def _scored(indexer: Indexer, n_pairs: int) -> float:
    return 2.0 * indexer.n_heads * (indexer.head_dim + 1) * n_pairs


def window_blocks(window: Any, block: Any) -> Any:
    """Key blocks that one block of queries touches under a window. The arguments may be arrays."""
    return -(-(window - 1) // block) + 1


def causal_blocks(n_rows: Any, width: Any) -> Any:
    """Blocks of a causal band of `n_rows` block rows, each at most `width` <= `n_rows` blocks wide.

    Splash attention computes these blocks whole. The arguments may be arrays.
    """
    return width * (width + 1) / 2 + (n_rows - width) * width
