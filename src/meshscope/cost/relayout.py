"""What a compiled step lays out anew: registers that are shuffled, and bytes that pass through memory.

Of a bf16 array the last two dimensions lie in tiles of 8 x 128 numbers; a dimension of 2 or 4 makes
tiles of as many rows, each of which the vector unit moves by itself. Read off the programs of libtpu
0.0.42.1 (layers scanned):

- Of the weights of keys and values with 2 to 7 heads a device each row of the residual is a tile of its
  own, laid out anew in each layer; of queries with a multiple of 8 heads, a pass.
- Experts whose rows travel: buffers with room for the worst routing are cleared on both sides of the
  exchange, gathered into the order of experts and back, and what no row fills is selected away; rows travel
  as two halves, in tiles of two, which are put together behind the exchange. Between the experts'
  products three arrays as wide as they pass.
- Gates and ups of experts whose columns on a device do not fill tiles are held with the residual dimension
  last, which wastes less, and turned whole in each step, as the kernel wants them.
- tpu7x, one sequence and sp: the residual stream between the collectives and the products.
"""

from dataclasses import dataclass
from typing import Final

from meshscope.spec.hardware.compiler_facts import CompilerFacts

ROWS: Final = 8  # of a full tile
LANES: Final = 128
KEYS_AND_VALUES: Final = 2
CLEARED: Final = 2  # times that the room is written before rows come, on the way there and back
# Of the tiles of two that are shuffled behind the exchange, as many as cost a tile: read off a prefill of
# DeepSeek-V2-Lite on v6e.
SHUFFLED: Final = 0.34
# Times that turning takes what a pass over the same tiles would: read off decode steps of Qwen3-30B-A3B with
# tp=8, 6.3 on v6e and 4.9 on v5e.
TURNED: Final = 5.5
GATHERED: Final = 6  # times that it is read or written to bring rows into an order and back


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayoutBytes:
    """What is laid out anew for each of a size of the workload: shuffled tiles, or elements in passes."""

    size: str  # a name in terms.TERMS
    n_tiles: float = 0.0
    n_elements: float = 0.0


def of_projections(
    hidden: int, local_heads: int, local_kv_heads: int, head_dim: int
) -> RelayoutBytes:
    """The weights of queries, keys and values of one layer, where a device has several tokens."""
    width = head_dim / LANES
    tiles, elements = 0.0, 0.0
    if 1 < local_kv_heads < ROWS:
        tiles += KEYS_AND_VALUES * hidden * width
    if local_heads % ROWS == 0:
        elements += hidden * local_heads * head_dim
    elif local_heads == ROWS // 2:
        tiles += hidden * width
    return RelayoutBytes(size="several", n_tiles=tiles, n_elements=elements)


def of_residual(facts: CompilerFacts, *, is_split: bool, hidden: int) -> RelayoutBytes:
    """The residual stream of one layer of prefill."""
    is_narrow = facts.relayouts_split_residual.value and is_split
    return RelayoutBytes(size="tokens_single", n_tiles=2 * hidden / LANES if is_narrow else 0.0)


def of_expert_columns(*, hidden: int, local_ffn: int, local_experts: float) -> RelayoutBytes:
    """The gates and ups of one layer's experts on a device, once a step."""
    if local_ffn % LANES == 0:
        return RelayoutBytes(size="one")
    lanes = -(-local_ffn // LANES) * LANES
    return RelayoutBytes(size="one", n_elements=TURNED * 2 * local_experts * hidden * lanes)


def of_room(*, hidden: int, ffn: int, is_exchanged: bool) -> RelayoutBytes:
    """One row of the room that a device has for the rows of its experts, in one layer."""
    between = 3 * ffn
    if not is_exchanged:
        return RelayoutBytes(size="bs", n_elements=between + 2 * hidden)
    halves = 2
    return RelayoutBytes(
        size="bs",
        n_tiles=SHUFFLED * hidden / halves / LANES,
        n_elements=between + (CLEARED + GATHERED) * hidden,
    )
