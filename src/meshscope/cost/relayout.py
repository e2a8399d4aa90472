"""Relayouts in a compiled step: tiles that are shuffled, and bytes that pass through memory.

The last two dimensions of a bf16 array form tiles of 8 x 128 numbers. A dimension of 2 or 4 makes tiles
with 2 or 4 rows, and the vector unit moves each separately. Read from programs of libtpu 0.0.42.1 with
scanned layers:

- Key and value weights with 2 to 7 heads per device: each row of the residual stream is a tile, relaid
  out in each layer. Query weights with a multiple of 8 heads take one pass.
- Exchanged expert rows: buffers sized for the worst routing are zeroed on both sides of the exchange,
  gathered into expert order and back, and unused rows are masked. Rows travel as two halves in two-row
  tiles, which are merged after the exchange. Three arrays as wide as the experts pass between their
  products.
- Gate and up matrices whose local columns do not fill tiles are stored with the residual dimension last,
  which wastes less, and transposed in each step for the kernel.
- tpu7x, one sequence and sp: the residual stream between collectives and products.
"""

from dataclasses import dataclass
from typing import Final

from meshscope.cost.workload_features import Feature
from meshscope.spec.hardware.compiler_facts import CompilerFacts

ROWS: Final = 8  # of a full tile
LANES: Final = 128
KEYS_AND_VALUES: Final = 2
HALVES: Final = 2  # in which exchanged rows travel


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayout:
    """Tiles shuffled and elements moved per unit of a workload feature."""

    feature: Feature
    n_tiles: float = 0.0
    n_elements: float = 0.0


def projection_relayout(
    *, hidden: int, local_heads: int, local_kv_heads: int, head_dim: int
) -> Relayout:
    """Query, key and value weights of one layer, on a device with several tokens."""
    width = head_dim / LANES
    tiles, elements = 0.0, 0.0
    if 1 < local_kv_heads < ROWS:
        tiles += KEYS_AND_VALUES * hidden * width
    if local_heads % ROWS == 0:
        elements += hidden * local_heads * head_dim
    elif local_heads == ROWS // 2:
        tiles += hidden * width
    return Relayout(feature=Feature.SEVERAL_TOKENS, n_tiles=tiles, n_elements=elements)


def residual_relayout(facts: CompilerFacts, *, is_split: bool, hidden: int) -> Relayout:
    """The residual stream of one layer in prefill."""
    is_relaid = facts.relayouts_split_residual.value and is_split
    n_tiles = 2 * hidden / LANES if is_relaid else 0.0
    return Relayout(feature=Feature.LONE_SEQUENCE_TOKENS, n_tiles=n_tiles)


def expert_weight_relayout(
    facts: CompilerFacts, *, hidden: int, local_ffn: int, local_experts: float
) -> Relayout:
    """Gate and up matrices of one layer's experts on a device, once per step."""
    if local_ffn % LANES == 0:
        return Relayout(feature=Feature.ONE)
    lanes = -(-local_ffn // LANES) * LANES
    n_elements = facts.transpose_passes.value * 2 * local_experts * hidden * lanes
    return Relayout(feature=Feature.ONE, n_elements=n_elements)


def expert_buffer_relayout(
    facts: CompilerFacts, *, hidden: int, ffn: int, is_exchanged: bool
) -> Relayout:
    """One row of a device's expert buffer, in one layer."""
    between_products = 3 * ffn
    if not is_exchanged:
        return Relayout(feature=Feature.TOKENS, n_elements=between_products + 2 * hidden)
    passes = facts.memset_passes.value + facts.gather_passes.value
    return Relayout(
        feature=Feature.TOKENS,
        n_tiles=facts.shuffle_frac.value * hidden / HALVES / LANES,
        n_elements=between_products + passes * hidden,
    )
