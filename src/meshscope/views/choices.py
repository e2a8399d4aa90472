"""Tables and documents of what a user can choose from: chips, slices and models of the catalog."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from meshscope.analysis.utilization import n_parameters
from meshscope.errors import SpecError
from meshscope.interconnect.fabric import wraps_around
from meshscope.spec.hardware.chips import CHIPS, GIB, Chip, ChipKind
from meshscope.spec.hardware.slices import cloud_name, standard_slices
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.model.catalog import CATALOG, CatalogEntry
from meshscope.spec.model.config import read_model
from meshscope.units import format_gib
from meshscope.views.tables import new_table


def chip_table() -> Table:
    """The chips, one row each: standard slices, and the peaks of one chip."""
    table = new_table("chip", "slices", "HBM", "HBM rate", "bf16 peak", "link", n_words=2)
    for chip in CHIPS.values():
        if chip.kind is not ChipKind.CPU:
            table.add_row(chip.name, _slice_range(chip), *_chip_cells(chip))
    return table


def _slice_range(chip: Chip) -> str:
    """`v6e-1 to v6e-256`."""
    if chip.kind is not ChipKind.TPU:
        return f"{chip.name}:N"
    slices = standard_slices(chip)
    first, last = (cloud_name(chip, slices[at].n_chips) for at in (0, -1))
    return f"{first} to {last}"


def _chip_cells(chip: Chip) -> tuple[str, ...]:
    """HBM that programs may use, and peaks of one chip."""
    hbm_bytes = chip.device_hbm_bytes
    return (
        format_gib(None if hbm_bytes is None else hbm_bytes * chip.devices_per_chip),
        _scaled(chip.hbm_bytes_per_s, 1e9, "GB/s"),
        _scaled(chip.bf16_flops_per_s, 1e12, "TFLOP/s"),
        _scaled(chip.link_bytes_per_s, 1e9, "GB/s"),
    )


def slice_table(chip: Chip) -> Table:
    """The standard slices of a TPU, one row each."""
    table = new_table("slice", "grid", "wraps", "chips", "devices", "HBM", "bf16 peak", n_words=3)
    for topology in standard_slices(chip):
        facts = slice_document(topology)
        table.add_row(
            facts["cloud_name"],
            facts["name"],
            ", ".join(facts["wraps"]) or "-",
            f"{topology.n_chips:,}",
            f"{topology.n_devices:,}",
            _scaled(facts["hbm_bytes"], GIB, "GiB"),
            _scaled(facts["bf16_flops_per_s"], 1e15, "PFLOP/s"),
        )
    return table


def slice_document(topology: Topology) -> dict[str, Any]:
    """A slice as plain values; `hbm_bytes` is what programs may use, over all devices."""
    chip, device_bytes = topology.chip, topology.chip.device_hbm_bytes

    def total(of_chip: float | None) -> float | None:
        return None if of_chip is None else of_chip * topology.n_chips

    wraps = zip("xyz", wraps_around(topology), strict=True)
    return {
        "cloud_name": cloud_name(chip, topology.n_chips),
        "name": topology.name,
        "chip": chip.name,
        "n_chips": topology.n_chips,
        "n_devices": topology.n_devices,
        "n_hosts": -(-topology.n_chips // chip.chips_per_host),
        "device_hbm_bytes": device_bytes,
        "hbm_bytes": None if device_bytes is None else device_bytes * topology.n_devices,
        "hbm_bytes_per_s": total(chip.hbm_bytes_per_s),
        "bf16_flops_per_s": total(chip.bf16_flops_per_s),
        "link_bytes_per_s": chip.link_bytes_per_s,
        "wraps": [name for name, is_ring in wraps if is_ring],
        "source": chip.source,
    }


def model_table(documents: Iterable[dict[str, Any]]) -> Table:
    """The models, one row each."""
    names = ("model", "family", "layers", "params\n(1e9)", "active\n(1e9)", "length")
    table = new_table(*names, n_words=2)
    for facts in documents:
        length = facts["max_position"]
        table.add_row(
            facts["id"],
            facts["family"],
            str(facts["n_layers"]),
            f"{facts['n_parameters'] / 1e9:.1f}",
            f"{facts['n_active_parameters'] / 1e9:.1f}",
            "-" if length is None else f"{length // 1024}k",
        )
    return table


def model_documents(search: str = "") -> list[dict[str, Any]]:
    """The models of the catalog whose id, alias or family contains `search`; SpecError if none does."""
    wanted = search.lower()
    matches = [
        entry for entry in CATALOG.values() if any(wanted in n for n in _search_names(entry))
    ]
    if not matches:
        raise SpecError(
            f"no model of the catalog contains '{search}'. 'meshscope models' lists all; MODEL can "
            "also be the path of a config.json."
        )
    return [_model_document(entry) for entry in matches]


def _search_names(entry: CatalogEntry) -> Sequence[str]:
    family = str(entry.config["model_type"])
    return [name.lower() for name in (entry.name, *entry.aliases, family)]


def _model_document(entry: CatalogEntry) -> dict[str, Any]:
    """`n_active_parameters` are those that one token meets."""
    model = read_model(entry.name)
    n_total, n_active, _ = n_parameters(model)
    return {
        "id": entry.name,
        "same_sizes": list(entry.aliases),
        "family": model.family.value,
        "n_parameters": n_total,
        "n_active_parameters": n_active,
        "n_layers": model.n_layers,
        "max_position": model.max_position,
        "default_dtype": model.default_weight_dtype,
        "source": entry.source,
    }


def _scaled(value: float | None, scale: float, unit: str) -> str:
    """A rate or a size in whole units, one decimal below ten; `?` if unknown."""
    if value is None:
        return "?"
    n = value / scale
    return f"{n:,.0f} {unit}" if n >= 10 else f"{n:.1f} {unit}"
