"""What libtpu does to compiled programs, and the constants fitted to those programs, by chip and version.

Check every fact and refit every constant here before relying on a new libtpu:

- `CompilerFacts` holds behavior observed in compiled programs; each value names its source.
- `fitted_constants.json` holds the fits. `tools/fit_collectives.py` writes the `collectives` entries
  and `tools/fit_closed_form.py` the `closed_form` entries.

A lookup without a version, or with a version that has no entry, returns the nearest known version.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

T = TypeVar("T")

FITTED_CONSTANTS = "fitted_constants.json"
ALL_CHIPS = "all"  # entry of the constants fitted to the programs of all chips together

_COMPILED = "compiled with libtpu 0.0.42.1"


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
    """The behavior of one libtpu version on one chip. The defaults apply to every chip."""

    chip: str
    libtpu: str

    # Programs that the compiler accepts.
    max_ragged_all_to_all_chips: Fact[int | None] = Fact(
        value=None, source=f"no limit found; {_COMPILED}"
    )
    ragged_dot_row_multiple: Fact[int] = Fact(
        value=8,
        source="rows for which XLA lowers a ragged dot to its kernel and not to products with all experts; "
        "libtpu 0.0.42.1 and 0.0.50.1, docs/kernels.md",
    )
    max_stacked_experts: Fact[int] = Fact(
        value=8192, source=f"the kernel lists the experts one by one: 25 s for 6,144; {_COMPILED}"
    )
    ragged_dot_dtypes: Fact[tuple[str, ...]] = Fact(
        value=("bf16", "f32", "s8"),
        source="dtypes of experts that the kernel of a ragged dot reads as they are stored; it converts "
        f"fp8 to float32 in HBM first; v5e and v6e, {_COMPILED}",
    )
    kernel_dtypes: Fact[tuple[str, ...]] = Fact(
        value=("bf16", "f32"), source=f"Mosaic refuses f16 loads; {_COMPILED}"
    )
    torch_xla_flags: Fact[str] = Fact(
        value="", source="torch_xla 2.9 __init__.py, _setup_libtpu_flags"
    )

    # Collectives.
    gather_route: Fact[GatherRoute] = Fact(
        value=GatherRoute.RING,
        source="emitters 1DAllGather* for 67 MB over 2x4, 4x4 and 16x16 slices of v5e and v6e, libtpu 0.0.42; "
        "tpu7x: published gathers over 2x2x1 and 2x2x2 both run at the rate of two links",
    )
    grids_gathered_by_dimension: Fact[tuple[tuple[int, ...], ...]] = Fact(
        value=(), source=_COMPILED
    )
    has_short_all_reduces: Fact[bool] = Fact(
        value=True,
        source="emitter RotatedPincerShortEmitter of small all-reduces on v5e, v5p, v6e and tpu7x; "
        f"{_COMPILED}",
    )
    offloads_all_reduces_from: Fact[int | None] = Fact(
        value=None, source=f"the core runs all-reduces; {_COMPILED}"
    )
    has_async_fsdp_gathers: Fact[bool] = Fact(
        value=False, source=f"all-gathers of fsdp weights in prefill are synchronous; {_COMPILED}"
    )

    # Estimates.
    launch_cycles: Fact[int] = Fact(
        value=1820, source=f"the least estimate of an operation without products; {_COMPILED}"
    )
    vector_factor: Fact[float] = Fact(
        value=0.3,
        source="measured over estimated time, beyond the launch, where the vector unit binds: two relayouts "
        "of 14.7 MB to tiles of one row are estimated at 79.7 us and take 23.5 and 24.0 us "
        "(openxla/xprof@5fe358978e59, golden hlo_stats, v5p); libtpu 0.0.42.1",
    )
    gathered_row_cycles: Fact[tuple[float, float]] = Fact(
        value=(15.0, 1.7),
        source="for each row from HBM, and for each of its tiles of 128 elements, of which libtpu reads 512 "
        "bytes: its static profile, with its model of DMA latency, has 42.3, 69.6 and 110.4 cycles for rows of "
        f"2,048, 4,096 and 7,168 bf16 (v6e); {_COMPILED}",
    )
    gathered_vmem_row_cycles: Fact[tuple[float, float]] = Fact(
        value=(5.0, 0.3),
        source="the same from VMEM: 6.2 cycles for rows of 1,024 bf16, 7.8 to 15.0 for 2,048, 12.1 for 4,096 "
        f"(v6e); {_COMPILED}",
    )
    gathered_element_cycles: Fact[float] = Fact(
        value=11.0,
        source="static profile of 8 elements of each row: 6,171 cycles for f32[64,128], 45,491 for "
        f"f32[512,128] (v6e); {_COMPILED}",
    )
    sorted_register_cycles: Fact[float] = Fact(
        value=2.5,
        source="for each pass over a register: static profile of 32,768 keys with their positions, 19,480 cycles "
        f"in 120 passes over 64 registers (v6e); {_COMPILED}",
    )
    splash_block_cycles: Fact[float | None] = Fact(
        value=None, source="not compiled: splash attention takes a fraction of the peak"
    )
    vector_interval: Fact[tuple[float, float]] = Fact(value=(0.5, 1.5), source="assumed")
    cycles_interval: Fact[tuple[float, float]] = Fact(
        value=(0.78, 1.22),
        source="measured over estimated time of n x n bf16 products: tpu7x 1024 0.96, 2048 1.22, 4096 1.07, "
        "16384 1.03, 32768 1.06; v6e 8192 0.78 and 0.86. Products below a microsecond (tpu7x, 128 to "
        "512) reach 0.6 to 0.8. benchmarks/matmul_cycles.py with libtpu 0.0.42.1",
    )


_BY_DIMENSION = Fact(
    value=GatherRoute.BY_DIMENSION,
    source="emitters 2DAllGather and 3DAllGather, libtpu 0.0.42; v5p gathers over 2x2x1 were measured "
    "at the rate of one link (openxla/xprof@5fe358978e59)",
)
_SPLASH_BUNDLES = (
    "bundles for 512 x 512 scores of a head of 128 numbers in the loop of jax's splash attention, and 300 of fetch "
    f"and synchronization: {{}}; {_COMPILED}"
)
_TWO_CORES = Fact(
    value=(7.5, 0.9),
    source="the two cores of a device share the rows: 22.1 cycles for rows of 2,048 bf16 in HBM (v5p); v4 is "
    f"assumed to be like v5p; {_COMPILED}",
)
_SPLASH_ON_TWO_CORES: Fact[float | None] = Fact(
    value=742.0,
    source=_SPLASH_BUNDLES.format("1,183 on v5p; two cores; v4 is assumed to be like it"),
)
_SMALL_GRIDS = Fact(
    value=((2, 2),),
    source="emitter 2DAllGatherOnMajorDim, strategy StrategySubgroupND, libtpu 0.0.42",
)
_ASYNC_GATHERS = Fact(
    value=True,
    source=f"{_COMPILED}; v5e also prefetches the MLP's last matrix in decode, which is left out",
)
_V5_FLAGS = Fact(
    value="--xla_enable_async_all_gather=true --xla_enable_async_collective_permute=true",
    source="torch_xla 2.9 __init__.py, _setup_libtpu_flags",
)

_FACTS: tuple[CompilerFacts, ...] = (
    CompilerFacts(
        chip="v4",
        libtpu="0.0.42.1",
        splash_block_cycles=_SPLASH_ON_TWO_CORES,
        gathered_row_cycles=_TWO_CORES,
        gather_route=_BY_DIMENSION,
        has_short_all_reduces=Fact(
            value=False, source=f"RotatedPincerEmitter from 2 kB on, over 2x2x1; {_COMPILED}"
        ),
    ),
    CompilerFacts(
        chip="v5e",
        libtpu="0.0.42.1",
        splash_block_cycles=Fact(value=1487.0, source=_SPLASH_BUNDLES.format("1,187")),
        max_ragged_all_to_all_chips=Fact(
            value=16, source=f"v5e:4x8 and larger: 'limited ICI routing'; {_COMPILED}"
        ),
        torch_xla_flags=_V5_FLAGS,
        grids_gathered_by_dimension=_SMALL_GRIDS,
        has_async_fsdp_gathers=_ASYNC_GATHERS,
    ),
    CompilerFacts(
        chip="v5p",
        libtpu="0.0.42.1",
        splash_block_cycles=_SPLASH_ON_TWO_CORES,
        gathered_row_cycles=_TWO_CORES,
        torch_xla_flags=_V5_FLAGS,
        gather_route=_BY_DIMENSION,
    ),
    CompilerFacts(
        chip="v6e",
        libtpu="0.0.42.1",
        splash_block_cycles=Fact(value=1219.0, source=_SPLASH_BUNDLES.format("919")),
        grids_gathered_by_dimension=_SMALL_GRIDS,
    ),
    CompilerFacts(
        chip="tpu7x",
        libtpu="0.0.42.1",
        splash_block_cycles=Fact(value=1212.0, source=_SPLASH_BUNDLES.format("912")),
        offloads_all_reduces_from=Fact(
            value=1 << 16,
            source=f"SparseCores run all-reduces from 64 KiB on, over 2, 8 and 32 devices; {_COMPILED}",
        ),
        has_async_fsdp_gathers=_ASYNC_GATHERS,
        ragged_dot_dtypes=Fact(
            value=("bf16", "f32", "f8e4m3fn", "f8e5m2"),
            source=f"as above, but int8 is converted; {_COMPILED}",
        ),
    ),
)


@cache
def compiler_facts(chip: str = "", libtpu: str | None = None) -> CompilerFacts:
    """The facts of a chip at the nearest known libtpu version; the defaults for an unlisted chip."""
    by_version = {facts.libtpu: facts for facts in _FACTS if facts.chip == chip}
    if not by_version:
        version = nearest_version((facts.libtpu for facts in _FACTS), libtpu)
        return CompilerFacts(chip=chip, libtpu=version)
    return by_version[nearest_version(by_version, libtpu)]


def nearest_version(known: Iterable[str], libtpu: str | None) -> str:
    """The newest known version up to `libtpu`, else the oldest; the newest of all for None."""
    ordered = sorted(set(known), key=_version_key)
    if libtpu is None:
        return ordered[-1]
    earlier = [version for version in ordered if _version_key(version) <= _version_key(libtpu)]
    return earlier[-1] if earlier else ordered[0]


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".") if number.isdigit())


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """The fitted constants of one chip.

    `collectives` are the fields of `interconnect.LinkConstants`; None without published link figures.
    `closed_form` has `constants`, the fields of `cost.efficiency.ClosedConstants`, fitted to `n_fitted`
    published steps, `spreads`, their factors at the bounds of an interval that covers the `n_holdout`
    other steps, and `is_fitted`, whether any of the steps ran on this chip.
    """

    libtpu: str
    collectives: Mapping[str, Any] | None
    closed_form: Mapping[str, Any]
    n_fitted: int
    n_holdout: int


@cache
def fitted_constants(chip: str, libtpu: str | None = None) -> FittedConstants:
    """The constants of a chip at the nearest known libtpu version; `closed_form` of all chips if it has none."""
    versions = read_fitted_constants()["libtpu"]
    version = nearest_version(versions, libtpu)
    fits = versions[version]
    chips, closed_form = fits["chips"], fits["closed_form"]
    entry: Mapping[str, Any] = chips.get(chip, {})
    return FittedConstants(
        libtpu=version,
        collectives=entry.get("collectives"),
        closed_form=entry.get("closed_form") or chips[ALL_CHIPS]["closed_form"],
        n_fitted=closed_form["n_fitted"],
        n_holdout=closed_form["n_holdout"],
    )


def read_fitted_constants() -> dict[str, Any]:
    """`fitted_constants.json` as it is stored: libtpu version, then chip."""
    text = files("meshscope.spec.hardware").joinpath(FITTED_CONSTANTS).read_text(encoding="utf-8")
    return json.loads(text)
