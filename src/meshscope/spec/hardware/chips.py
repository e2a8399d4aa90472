"""Published peak figures of chips, each with its source, from `chips.json`.

Achieved rates are measurements; runs and profiles hold them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any

from meshscope.errors import SpecError, nearest
from meshscope.serialize import from_plain

GIB = 2**30


class ChipKind(StrEnum):
    """The type of accelerator."""

    TPU = "tpu"
    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Published peaks of one chip; None if no figure is published."""

    name: str
    kind: ChipKind
    devices_per_chip: int  # as listed by JAX
    n_grid_dims: int  # 2: a 2D torus, 3: a 3D torus, 1: no torus
    chips_per_host: int
    hbm_bytes: int | None = None
    hbm_bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    link_bytes_per_s: float | None = None  # one link, ONE direction
    # An axis wraps around if its size is a multiple of this. A 3D torus wraps only if all three
    # sizes are: optical switches connect whole cubes (same page).
    wraps_from: int | None = None
    source: str
    pod_chips: int | None = None  # chips of a pod, the most that ICI connects
    clock_hz: float | None = None  # clock of the cycles in the compiler's estimates
    mxu_dim: int | None = None  # rows and columns of one matrix unit
    compiler_config: str | None = None  # libtpu's chip configuration, if not its default
    die_bytes_per_s: float | None = None  # between the two cores of a chip, one direction

    # HBM of one device that programs may use; libtpu 0.0.42.1 reserves the rest (the limit that it
    # states when a program exceeds it).
    program_hbm_bytes: int | None = None

    @property
    def device_hbm_bytes(self) -> int | None:
        """HBM of one device that programs may use, in bytes; all of it if no limit is known."""
        if self.hbm_bytes is None or self.program_hbm_bytes is not None:
            return self.program_hbm_bytes
        return self.hbm_bytes // self.devices_per_chip


def _chip(name: str, facts: Mapping[str, Any]) -> Chip:
    """The chip of an entry, whose notes say where single figures come from."""
    values = {key: value for key, value in facts.items() if key != "notes"}
    for key in ("hbm", "program_hbm"):
        if f"{key}_gib" in values:
            values[f"{key}_bytes"] = int(values.pop(f"{key}_gib") * GIB)
    return from_plain(Chip, {"name": name, **values})


_DOCUMENT = json.loads((files("meshscope.spec.hardware") / "chips.json").read_text("utf-8"))
CHIPS = {name: _chip(name, facts) for name, facts in _DOCUMENT["chips"].items()}
CHIP_ALIASES: dict[str, str] = _DOCUMENT["aliases"]


def chip_of(name: str) -> Chip:
    """The chip with this name or alias; SpecError suggests the nearest names."""
    key = CHIP_ALIASES.get(name.lower(), name.lower())
    if key not in CHIPS:
        raise SpecError(f"unknown chip '{name}'. {nearest(name, [*CHIPS, *CHIP_ALIASES])}")
    return CHIPS[key]
