"""Slices of accelerators: chip, grid and number of slices, parsed from common names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from math import isqrt, prod
from typing import Any

from meshscope.errors import SpecError
from meshscope.hardware.chips import CHIPS, Chip, ChipKind, chip_of, tpu_of_kind

MAX_DEVICES = 65_536  # larger than any slice; limits the damage of a typo
MAX_SINGLE_HOST = 8  # chips

_FORM = re.compile(
    r"(?:(?P<slices>[0-9]+)x)?(?P<chip>[a-zA-Z][a-zA-Z0-9]*?)(?P<sep>[:-])(?P<size>[0-9]+(?:x[0-9]+)*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`n_slices` slices, each a `grid` of chips; for CPU and GPU the grid is a device count."""

    chip: Chip
    grid: tuple[int, ...]
    n_slices: int = 1

    @property
    def name(self) -> str:
        """The canonical name, e.g. `v6e:2x4` or `2xv6e:4x4`."""
        slices = f"{self.n_slices}x" if self.n_slices > 1 else ""
        return f"{slices}{self.chip.name}:{'x'.join(map(str, self.grid))}"

    @property
    def n_chips(self) -> int:
        """Chips over all slices."""
        return prod(self.grid) * self.n_slices

    @property
    def n_hosts(self) -> int:
        """VMs over all slices: v5e and v6e have one for up to 8 chips. Source: page "TPU configurations"."""
        n, per_host = prod(self.grid), self.chip.chips_per_host
        is_single = self.chip.is_rented_singly and n <= MAX_SINGLE_HOST
        return self.n_slices * (1 if is_single else -(-n // per_host))

    @property
    def n_devices(self) -> int:
        """Devices over all slices, as listed by JAX."""
        return self.n_chips * self.chip.devices_per_chip

    @property
    def devices_per_slice(self) -> int:
        """Devices per slice."""
        return self.n_devices // self.n_slices

    def crosses_slices(self, groups: Sequence[Sequence[int]]) -> bool | None:
        """Whether any group of device ids spans slices and uses DCN; None for a single slice."""
        if self.n_slices == 1:
            return None
        per_slice = self.devices_per_slice
        return any(len({device // per_slice for device in group}) > 1 for group in groups)

    def check_tpu(self, what: str, remedy: str = "Use one, e.g. v6e-8.") -> None:
        """SpecError unless it is a TPU slice, which `what` needs, such as `functions compile only for TPUs`."""
        if self.chip.kind is not ChipKind.TPU:
            raise SpecError(f"'{self.name}' is not a TPU slice; {what}. {remedy}")

    def keeps_slices(self, order: Sequence[int]) -> bool:
        """Whether the devices of each slice follow one another in the order."""
        n = self.devices_per_slice
        return not self.crosses_slices([order[at : at + n] for at in range(0, len(order), n)])

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Chips of one host along x, y, z: 2x2x1, or less if the slice is smaller than a host."""
        sizes = [*self.grid, 1]
        return (min(2, sizes[0]), min(2, sizes[1]), 1)


def parse_topology(text: str, *, is_imported: bool = False) -> Topology:
    """Parse `v6e-8` (cloud name), `v6e:2x4` (chip grid), `2xv6e:4x4`, `cpu:8` or `h100:4`.

    With `is_imported`, chips without published rates are accepted, too.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise SpecError(
            f"topology '{text}' is not a valid name. Use a cloud name (v6e-8), a chip grid (v6e:2x4), "
            "several slices (2xv6e:4x4), or a device count (cpu:8, h100:4)."
        )
    chip = chip_of(match["chip"], is_imported=is_imported)
    sizes = tuple(int(s) for s in match["size"].split("x"))
    is_cloud_name = chip.kind is ChipKind.TPU and "x" not in match["size"]
    n_slices = int(match["slices"] or 1)
    if not all(sizes) or not n_slices:
        raise SpecError(f"topology '{text}' has a size of 0. Use sizes of at least 1.")
    grid = _grid_of_cloud_name(text, chip, sizes[0]) if is_cloud_name else sizes
    topology = Topology(chip=chip, grid=grid, n_slices=n_slices)
    _check(text, topology)
    return topology


def _check(text: str, topology: Topology) -> None:
    chip, grid, n_dims = topology.chip, topology.grid, topology.chip.n_grid_dims
    if topology.n_devices > MAX_DEVICES:
        raise SpecError(
            f"topology '{text}' has {topology.n_devices} devices. Use at most {MAX_DEVICES}."
        )
    if len(grid) != n_dims:
        example = {1: "8", 2: "2x4", 3: "2x2x1"}[n_dims]
        raise SpecError(
            f"topology '{text}' has {len(grid)} dimensions; a {chip.name} grid has {n_dims}. "
            f"Write it like '{chip.name}:{example}'."
        )
    n_chips, n_pod = prod(grid), chip.pod_chips
    side = isqrt(n_pod or 0) if n_dims == 2 else n_pod or 0
    if n_pod is not None and (n_chips > n_pod or max(grid) > side):
        sides = f", {side}x{side}" if n_dims == 2 else ""
        remedy = "Use a smaller slice."
        if n_dims == 2 and n_chips > n_pod:
            remedy = f"Use several slices, like '{n_chips // n_pod}x{chip.name}:16x16'."
        raise SpecError(f"topology '{text}': a {chip.name} pod has {n_pod} chips{sides}. {remedy}")
    for size, host in zip(grid, topology.host_bounds, strict=False):
        if chip.kind is ChipKind.TPU and size % host:
            raise SpecError(
                f"topology '{text}': hosts of 2x2 chips do not divide the grid {'x'.join(map(str, grid))}. "
                "Use even sizes or 1."
            )


def _grid_of_cloud_name(text: str, chip: Chip, n_chips: int) -> tuple[int, ...]:
    """The default chip grid of a cloud name: the powers of two closest to a square or cube."""
    if chip.name_counts_cores:
        if n_chips % 2:
            raise SpecError(
                f"topology '{text}': {chip.name} names count cores, two per chip. Use an even number."
            )
        n_chips //= 2
    if n_chips & (n_chips - 1):
        raise SpecError(
            f"topology '{text}': {n_chips} chips have no default grid. "
            f"Write the grid, like '{chip.name}:{'x'.join(['4'] * chip.n_grid_dims)}'."
        )
    # In 2D, 8 chips are 2x4, 16 are 4x4. In 3D, up to one host 1x1x1, 1x2x1, 2x2x1; then 8 chips are 2x2x2, 16 are
    # 2x2x4, 32 are 2x4x4, 64 are 4x4x4.
    n_doublings, n_dims = n_chips.bit_length() - 1, chip.n_grid_dims
    n_split = 2 if n_doublings <= 2 else n_dims
    sides = tuple(1 << (n_doublings + i) // n_split for i in range(n_split))
    return sides + (1,) * (n_dims - n_split)


def cloud_name(chip: Chip, n_chips: int) -> str:
    """The cloud's name of a slice, e.g. `v6e-8`; v4, v5p and tpu7x names count cores, two per chip."""
    return f"{chip.name}-{n_chips * 2 if chip.name_counts_cores else n_chips}"


def standard_slices(chip: Chip) -> tuple[Topology, ...]:
    """The slices of a chip by size: powers of two, from a host to the largest in a pod."""
    sizes = takewhile(
        lambda n: n <= (chip.pod_chips or 0), (chip.chips_per_host << i for i in count())
    )
    singles = [1] if chip.is_rented_singly else []
    return tuple(parse_topology(cloud_name(chip, n)) for n in (*singles, *sizes))


def every_slice() -> tuple[Topology, ...]:
    """The standard slices of all TPUs, smallest first."""
    tpus = (chip for chip in CHIPS.values() if chip.kind is ChipKind.TPU)
    slices = (topology for chip in tpus for topology in standard_slices(chip))
    return tuple(sorted(slices, key=lambda topology: topology.n_chips))


def slice_of_devices(devices: Sequence[Any]) -> Topology:
    """The slice of JAX devices; SpecError if their kind is unknown or they form no grid."""
    kind, platform = str(devices[0].device_kind).lower(), devices[0].platform
    if platform == "cpu":
        return parse_topology(f"cpu:{len(devices)}")
    if platform == "gpu":
        names = [n for n, c in CHIPS.items() if c.kind is ChipKind.GPU and n in kind]
        if names:
            return parse_topology(f"{names[0]}:{len(devices)}")
    chip, coords = tpu_of_kind(kind), [getattr(device, "coords", None) for device in devices]
    if chip is not None and None not in coords:
        # Chips along each dimension.
        ends = [sorted(c[dim] for c in coords if c) for dim in range(chip.n_grid_dims)]
        grid = "x".join(str(of_dim[-1] - of_dim[0] + 1) for of_dim in ends)
        topology = parse_topology(f"{chip.name}:{grid}")
        if topology.n_devices == len(devices):
            return topology
    raise SpecError(
        f"the slice of {len(devices)} devices of kind '{devices[0].device_kind}' is unknown. "
        "Give topology=, such as 'v6e-8'."
    )
