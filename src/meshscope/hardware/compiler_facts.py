"""What libtpu does to compiled programs, and the constants fitted to those programs, by chip and version.

Check every fact and refit every constant here before relying on a new libtpu:

- `compiler_facts.json` holds behavior observed in compiled programs; each value names its source.
- `fitted_constants.json` holds the fits. `tools/fit_collectives.py` writes the `collectives` entries
  and `tools/fit_closed_form.py` the `closed_form` entries.

Both hold an entry for each version of libtpu, the newest last; lookups read only that one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from math import inf
from typing import Any, TypeVar

from meshscope.files import own_table
from meshscope.serialize import from_plain

T = TypeVar("T")

COMPILER_FACTS, FITTED_CONSTANTS = "compiler_facts.json", "fitted_constants.json"
OPERATION_FACTS = "operation_rates.json"
ALL_CHIPS = "all"  # entry of facts about every chip, or fitted to the programs of all chips


class GatherRoute(StrEnum):
    """How libtpu routes an all-gather or reduce-scatter over a torus."""

    RING = "ring"  # one ring through all chips of the group
    BY_DIMENSION = "by dimension"  # one torus dimension after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerFacts:
    """The behavior of libtpu on one chip."""

    # Programs that the compiler accepts.
    max_ragged_all_to_all_chips: int | None
    ragged_row_multiple: int  # bytes
    ragged_dot_row_multiple: int
    max_stacked_experts: int
    ragged_dot_dtypes: tuple[str, ...]
    kernel_dtypes: tuple[str, ...]
    torch_xla_flags: str

    # Collectives.
    gather_route: GatherRoute
    grids_gathered_by_dimension: tuple[tuple[int, ...], ...]
    has_short_all_reduces: bool
    offloads_all_reduces_from: int | None
    has_async_fsdp_gathers: bool
    grids_without_scatters: tuple[tuple[int, ...], ...]  # for groups of the whole slice
    scattered_rows: tuple[int, int] | None  # multiple of rows, most bytes; of a device
    gathered_rows: tuple[int, int]  # multiple of the elements of a device, most devices
    fetches_ahead_of_rows: bool

    # Estimates.
    launch_cycles: int
    vector_factor: float
    vector_product_cycles: float
    gathered_row_cycles: tuple[float, float]
    gathered_vmem_row_cycles: tuple[float, float]
    gathered_element_cycles: float
    sorted_register_cycles: float
    splash_block_cycles: float | None
    four_bit_cycles: tuple[float, float]
    fused_expert_cycles: tuple[float, float] | None
    vector_interval: tuple[float, float]
    cycles_interval: tuple[float, float]


@cache
def compiler_facts(chip: str = "") -> CompilerFacts:
    """The facts of a chip; an unlisted chip gets the facts of all chips."""
    by_name = _newest(COMPILER_FACTS).items()
    return _values(CompilerFacts, {name: by.get(chip, by[ALL_CHIPS]) for name, by in by_name})


def _values(kind: type[T], facts: Mapping[str, Any]) -> T:
    """The facts without their sources."""
    return from_plain(kind, {name: fact["value"] for name, fact in facts.items()})


def _newest(name: str) -> dict[str, Any]:
    *_, newest = read_facts(name)["libtpu"].values()
    return newest


@cache
def fitted_constants(chip: str) -> Mapping[str, Any]:
    """The fits of a chip: `closed_form` of all chips if it has none, and no `collectives` without link figures.

    `collectives` has the fields of `interconnect.LinkConstants`. `closed_form` has `constants`, the fields of
    `cost.rates.ClosedConstants`, fitted to `n_fitted` published steps; `spreads`, their factors at the bounds of an
    interval; `model_spread`, the least factor for a model that was not fitted, and `other_spread`, for steps of none of
    the `fitted_kinds` (phase, dtype of the weights, dense or mixture); `is_fitted` on this chip.
    """
    fits = _newest(FITTED_CONSTANTS)
    chips, n_fitted = fits["chips"], fits["closed_form"]["n_fitted"]
    common = {"closed_form": chips[ALL_CHIPS]["closed_form"], "n_fitted": n_fitted}
    return common | chips.get(chip, {})


def read_facts(name: str) -> dict[str, Any]:
    """A JSON file of this folder as it is stored."""
    return own_table(f"hardware/{name}")


Interval = tuple[float, float]  # factors, or fractions, at the bounds of a range


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakEfficiency:
    """Fraction of the published peaks that large operations reach, with the measured range.

    `hbm_interval` is relative to all three fractions of the HBM.
    """

    matmul: float
    matmul_interval: Interval
    hbm: float  # one op that reads
    hbm_write: float  # one that writes
    hbm_busy: float  # reads by several concurrent transfers
    hbm_interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Experts:
    """How a published decode program reads int8 experts: blocks of some, and a part of all experts."""

    n_together: int
    copied_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedExperts:
    """Experts as a server runs them: a start, a latency per expert, and rates of products and of rows."""

    start_s: float
    expert_s: float  # before the weights of an expert arrive
    flops_per_s: float
    row_bytes_per_s: float  # read and written by SparseCores, or sent by a fused kernel
    one_hot_flops_per_s: float = inf  # of products with masks that sort the rows of all tokens
    one_hot_rows: int = 0  # up to which it does


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttention:
    """Cycles of a version of ragged paged attention, for one block of queries and one of keys, by what they grow with.

    `load_cycles` load a key of one head, for each KV head in its page. A kernel that `skips_masked` leaves
    out blocks of keys after the last query of a block; others run over all keys up to the end of the chunk.
    """

    body_cycles: float
    fetch_cycles: float  # and synchronization
    head_cycles: float
    key_cycles: float
    load_cycles: float
    score_cycles: float  # of the vector unit
    skips_masked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBlockSizes:
    """Queries and keys in a block of a version of ragged paged attention.

    Queries are given, or rows by chip: queries times the query heads of a KV head, rounded up to a power of two.
    `by_heads` has other sizes for query and KV heads of a device, such as `32/8`.
    """

    n_keys: int
    n_queries: int | None = None
    n_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    by_heads: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFacts:
    """Rates and latencies of operations on any TPU, and factors of their intervals."""

    tpu_efficiency: PeakEfficiency
    gpu_efficiency: PeakEfficiency
    kernel_frac: float
    kernel_interval: Interval
    model_interval: Interval
    bytes_interval: Interval
    int8_experts: Int8Experts
    paged_attention: Mapping[str, PagedAttention]  # by version of the kernel
    paged_blocks: Mapping[str, PagedBlockSizes]
    grouped_experts: Mapping[str, Mapping[str, ServedExperts]]  # by version and chip
    fused_experts: Mapping[str, ServedExperts]  # of 8 bits, by chip
    vmem_over_hbm: float
    read_latency_s: float
    write_latency_s: float
    launch_s: float
    own_op_s: float
    latency_interval: Interval
    small_s: float  # an op below this, mostly launch and latency, is a small one
    core_share: float
    unknown_factors: Interval
    spread: float
    network_bytes_per_s: Mapping[str, float]  # by GPU


OPERATIONS = _values(OperationFacts, read_facts(OPERATION_FACTS))
