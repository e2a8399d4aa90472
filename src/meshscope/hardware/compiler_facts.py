"""What libtpu does to compiled programs, and the constants fitted to those programs, by chip and version.

Check every fact and refit every constant here before relying on a new libtpu:

- `compiler_facts.json` holds behavior observed in compiled programs; each value names its source.
- `fitted_constants.json` holds the fits. `tools/fit_collectives.py` writes the `collectives` entries
  and `tools/fit_closed_form.py` the `closed_form` entries.

Both hold an entry for each version of libtpu, the newest last; lookups read only that one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from meshscope.serialize import from_plain

T = TypeVar("T")

COMPILER_FACTS, FITTED_CONSTANTS = "compiler_facts.json", "fitted_constants.json"
ALL_CHIPS = "all"  # entry of facts about every chip, or fitted to the programs of all chips


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact(Generic[T]):
    """A value and where it was read."""

    value: T
    source: str


class GatherRoute(StrEnum):
    """How libtpu routes an all-gather or reduce-scatter over a torus."""

    RING = "ring"  # one ring through all chips of the group
    BY_DIMENSION = "by dimension"  # one torus dimension after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerFacts:
    """The behavior of libtpu on one chip."""

    # Programs that the compiler accepts.
    max_ragged_all_to_all_chips: Fact[int | None]
    ragged_dot_row_multiple: Fact[int]
    max_stacked_experts: Fact[int]
    ragged_dot_dtypes: Fact[tuple[str, ...]]
    kernel_dtypes: Fact[tuple[str, ...]]
    torch_xla_flags: Fact[str]

    # Collectives.
    gather_route: Fact[GatherRoute]
    grids_gathered_by_dimension: Fact[tuple[tuple[int, ...], ...]]
    has_short_all_reduces: Fact[bool]
    offloads_all_reduces_from: Fact[int | None]
    has_async_fsdp_gathers: Fact[bool]
    grids_without_scatters: Fact[tuple[tuple[int, ...], ...]]  # for groups of the whole slice
    scattered_rows: Fact[tuple[int, int] | None]  # multiple of rows, most bytes; of a device
    gathered_rows: Fact[tuple[int, int]]  # multiple of the elements of a device, most devices
    fetches_ahead_of_rows: Fact[bool]

    # Estimates.
    launch_cycles: Fact[int]
    vector_factor: Fact[float]
    vector_product_cycles: Fact[float]
    gathered_row_cycles: Fact[tuple[float, float]]
    gathered_vmem_row_cycles: Fact[tuple[float, float]]
    gathered_element_cycles: Fact[float]
    sorted_register_cycles: Fact[float]
    splash_block_cycles: Fact[float | None]
    four_bit_cycles: Fact[tuple[float, float]]
    fused_expert_cycles: Fact[tuple[float, float] | None]
    vector_interval: Fact[tuple[float, float]]
    cycles_interval: Fact[tuple[float, float]]


@cache
def compiler_facts(chip: str = "") -> CompilerFacts:
    """The facts of a chip; an unlisted chip gets the facts of all chips."""
    hints, facts = get_type_hints(CompilerFacts), _newest(COMPILER_FACTS)
    by_name = {name: by_chip.get(chip, by_chip[ALL_CHIPS]) for name, by_chip in facts.items()}
    typed: dict[str, Any] = {
        name: Fact(value=from_plain(get_args(hints[name])[0], fact["value"]), source=fact["source"])
        for name, fact in by_name.items()
    }
    return CompilerFacts(**typed)


def _newest(name: str) -> dict[str, Any]:
    *_, newest = read_facts(name)["libtpu"].values()
    return newest


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """The fitted constants of one chip."""

    # Fields of `interconnect.LinkConstants`; None without published link figures.
    collectives: Mapping[str, Any] | None
    # `constants`, the fields of `cost.rates.ClosedConstants`; `spreads`, their factors at the bounds of an
    # interval; `model_spread`, the least factor for a model that was not fitted, and `other_spread`, for steps of
    # none of the `fitted_kinds` (phase, dtype of the weights, dense or mixture); `is_fitted` on this chip.
    closed_form: Mapping[str, Any]
    n_fitted: int  # published steps
    n_judging: int  # other steps


@cache
def fitted_constants(chip: str) -> FittedConstants:
    """The constants of a chip; `closed_form` of all chips if it has none."""
    fits = _newest(FITTED_CONSTANTS)
    chips, closed_form = fits["chips"], fits["closed_form"]
    entry: Mapping[str, Any] = chips.get(chip, {})
    return FittedConstants(
        collectives=entry.get("collectives"),
        closed_form=entry.get("closed_form") or chips[ALL_CHIPS]["closed_form"],
        n_fitted=closed_form["n_fitted"],
        n_judging=closed_form["n_judging"],
    )


def read_facts(name: str) -> dict[str, Any]:
    """A JSON file of this folder as it is stored."""
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


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
class KeyLoads:
    """Keys and values of one head that paged attention of a server takes apart from pages with all heads.

    Each key and its value take `cycles` for each head and block of queries, by the number of KV heads in a page.
    """

    heads: tuple[int, ...]
    cycles: tuple[float, ...]
    block_queries: int


_STORED = read_facts("operation_rates.json")


def _fact(name: str, kind: type[T]) -> Fact[T]:
    stored = _STORED[name]
    return Fact(value=from_plain(kind, stored["value"]), source=stored["source"])


TPU_EFFICIENCY = _fact("tpu_efficiency", PeakEfficiency)
GPU_EFFICIENCY = _fact("gpu_efficiency", PeakEfficiency)
MEASURED_EFFICIENCY = _fact("measured_efficiency", PeakEfficiency)
KERNEL_FRAC = _fact("kernel_frac", float)
KERNEL_INTERVAL: Fact[Interval] = _fact("kernel_interval", Interval)
MODEL_INTERVAL: Fact[Interval] = _fact("model_interval", Interval)
BYTES_INTERVAL: Fact[Interval] = _fact("bytes_interval", Interval)
INT8_EXPERTS = _fact("int8_experts", Int8Experts)
KEY_LOADS = _fact("key_loads", KeyLoads)
VMEM_OVER_HBM = _fact("vmem_over_hbm", float)
READ_LATENCY_S = _fact("read_latency_s", float)
WRITE_LATENCY_S = _fact("write_latency_s", float)
LAUNCH_S = _fact("launch_s", float)
OWN_OP_S = _fact("own_op_s", float)
LATENCY_INTERVAL: Fact[Interval] = _fact("latency_interval", Interval)
# An op below this, mostly launch and latency, is a small one.
SMALL_S = _fact("small_s", float)
CORE_SHARE = _fact("core_share", float)
UNKNOWN_FACTORS: Fact[Interval] = _fact("unknown_factors", Interval)
SPREAD = _fact("spread", float)
