"""`meshscope models` and `meshscope topologies`: the models, chips and slices that are known."""

import re
from typing import Any

from rich.table import Table

from meshscope.analysis.utilization import n_parameters
from meshscope.api.console import Shown
from meshscope.api.options import option
from meshscope.errors import SpecError
from meshscope.hardware.chips import CHIPS, GIB, ChipKind, chip_of
from meshscope.hardware.interconnect.fabric import wraps_around
from meshscope.hardware.topology import Topology, cloud_name, every_slice, standard_slices
from meshscope.model.catalog import CatalogEntry, as_written, catalog, nearest_ids
from meshscope.model.config import LISTING, read_model
from meshscope.plans.plan import Plan
from meshscope.plans.weights import device_weight_bytes
from meshscope.reports.tables import new_table
from meshscope.reports.words import short_dtype
from meshscope.serialize import picked
from meshscope.units import format_gib

MODELS_NOTE = (
    "By owner, family and size. Params: all, and those that one token uses. Length:\n"
    "the longest sequence. Weights: their format by default (bytes: --json). A search\n"
    "also lists variants, such as -FP8. Any config.json of these families works, too:\n"
    "give its path as MODEL."
)


def models(
    *,
    search: str = option(
        "SEARCH: Part of an id or of a family's name, a format (fp8) or a size (70b).",
        default="",
        kw_only=False,
    ),
) -> Shown:
    """List or search the models of the catalog."""
    documents = model_documents(search)
    names = ("model", "params\n(1e9)", "active\n(1e9)", "length", "weights")
    table = new_table(*names, n_words=1)
    for facts in documents:
        length = facts["max_position"]
        table.add_row(
            facts["id"],
            f"{facts['n_parameters'] / 1e9:.1f}",
            f"{facts['n_active_parameters'] / 1e9:.1f}",
            "-" if length is None else f"{length // 1024}k",
            short_dtype(facts["default_dtype"]),
        )
    basis = "the config.json of each model"
    return Shown(lambda: documents, lambda _: [table, "", MODELS_NOTE], basis=basis)


HBM_NOTE = "HBM: what programs may use."
FORMS_NOTE = "Also chip grids (v6e:2x4), several slices (2xv6e:4x4) and CPU devices (cpu:8)."
PUBLISHED = "figures that vendors publish"


def topologies(
    *,
    chip: str | None = option("CHIP: A TPU, to list its slices.", default=None, kw_only=False),
) -> Shown:
    """List chips and slices: HBM, peaks and links.

    With --json, one object per standard slice.
    """
    tpu = None if chip is None else chip_of(chip)
    if tpu is not None and tpu.kind is not ChipKind.TPU:
        raise SpecError(
            f"{tpu.name} has no standard slices; give a number of devices, like {tpu.name}:8."
        )
    if tpu is None:
        notes = (f"{HBM_NOTE} Link: one ICI or NVLink link, one direction.", FORMS_NOTE)
        return Shown(
            lambda: [*map(slice_document, every_slice())],
            lambda _: [chip_table(), "", *notes],
            basis=PUBLISHED,
        )
    documents = [*map(slice_document, standard_slices(tpu))]
    table = new_table("slice", "grid", "wraps", "chips", "devices", "HBM", "bf16 peak", n_words=3)
    for facts in documents:
        names = (facts["cloud_name"], facts["name"], ", ".join(facts["wraps"]) or "-")
        counts = (f"{facts['n_chips']:,}", f"{facts['n_devices']:,}")
        peak = _scaled(facts["bf16_flops_per_s"], 1e15, "PFLOP/s")
        table.add_row(*names, *counts, _scaled(facts["hbm_bytes"], GIB, "GiB"), peak)
    note = f"{HBM_NOTE} Wraps: dimensions that close into a ring."
    return Shown(lambda: documents, lambda _: [table, "", note], basis=PUBLISHED)


def chip_table() -> Table:
    """The chips, one row each: standard slices, and the peaks of one chip."""
    table = new_table("chip", "slices", "HBM", "HBM rate", "bf16 peak", "link", n_words=2)
    for chip in (one for one in CHIPS.values() if one.kind is not ChipKind.CPU):
        slices, hbm_bytes = f"{chip.name}:N", chip.device_hbm_bytes
        if chip.kind is ChipKind.TPU:  # `v6e-1 to v6e-256`
            ends = standard_slices(chip)[0], standard_slices(chip)[-1]
            slices = " to ".join(cloud_name(chip, end.n_chips) for end in ends)
        hbm = format_gib(None if hbm_bytes is None else hbm_bytes * chip.devices_per_chip)
        rate, link = (
            _scaled(r, 1e9, "GB/s") for r in (chip.hbm_bytes_per_s, chip.link_bytes_per_s)
        )
        peak = _scaled(chip.bf16_flops_per_s, 1e12, "TFLOP/s")
        table.add_row(chip.name, slices, hbm, rate, peak, link)
    return table


def slice_document(topology: Topology) -> dict[str, Any]:
    """A slice as plain values; `hbm_bytes` is what programs may use, over all devices."""
    chip, device_bytes = topology.chip, topology.chip.device_hbm_bytes
    rates = picked(chip, "hbm_bytes_per_s", "bf16_flops_per_s").items()
    wraps = zip("xyz", wraps_around(topology), strict=True)
    return {
        "cloud_name": cloud_name(chip, topology.n_chips),
        "name": topology.name,
        "chip": chip.name,
        **picked(topology, "n_chips", "n_devices", "n_hosts"),
        "device_hbm_bytes": device_bytes,
        "hbm_bytes": None if device_bytes is None else device_bytes * topology.n_devices,
        **{name: None if of is None else of * topology.n_chips for name, of in rates},
        "link_bytes_per_s": chip.link_bytes_per_s,
        "wraps": [name for name, is_ring in wraps if is_ring],
        "source": chip.source,
    }


NO_MATCH = 4


def model_documents(search: str = "") -> list[dict[str, Any]]:
    """The models of the catalog, or those whose id or family contains `search`; SpecError if none does.

    A search also lists the variants of a model that match. Ids that start with it come first, then families
    that do, then the others, and models of this format or with as many parameters (`70b`); in each of them by owner,
    family and size.
    """
    entries = catalog().values()
    ids = [(one, name) for one in entries for name in (one.ids if search else (one.name,))]
    ranks = {name: _rank(search.lower(), entry, name) for entry, name in ids}
    if min(ranks.values()) == NO_MATCH:
        ranks = {name: _rank(as_written(search), entry, as_written(name)) for entry, name in ids}
    matches = [_model_document(entry, name) for entry, name in ids if ranks[name] < NO_MATCH]
    if of := _DESCRIPTION.fullmatch(search.lower()):
        listed = {one["id"] for one in matches}
        others = (_model_document(one, one.name) for one in entries if one.name not in listed)
        matches += [one for one in others if _has(of, one)]
    if not matches:
        raise SpecError(
            f"no model of the catalog contains '{search}'. {nearest_ids(search, LISTING)} "
            "MODEL can also be the path of a config.json."
        )

    def place(one: dict[str, Any]) -> tuple[int, str, str, int]:
        owner = one["id"].partition("/")[0].lower()
        return ranks[one["id"]], owner, one["family"], one["n_parameters"]

    return sorted(matches, key=place)


SIZE_ERROR = 0.02  # names round the number of parameters
_DESCRIPTION = re.compile(r"(?P<size>\d+(\.\d+)?)b|(?P<format>[a-z]+\d+)")


def _has(of: re.Match[str], document: dict[str, Any]) -> bool:
    """Whether a model has this format, or as many parameters in 1e9."""
    if of["size"] is None:
        return of[0] in re.split(r"\W", short_dtype(document["default_dtype"]).lower())
    n_parameters = document["n_parameters"] / 1e9
    return abs(n_parameters - float(of["size"])) <= SIZE_ERROR * n_parameters


def _rank(wanted: str, entry: CatalogEntry, name: str) -> int:
    """The place of an id in a search: 0 if it starts with `wanted`, `NO_MATCH` if it does not match."""
    owner, _, short = name.lower().partition("/")
    family = str(entry.config["model_type"])
    if not wanted:
        return 0
    if short.startswith(wanted) or f"{owner}/{short}".startswith(wanted):
        return 0 if name == entry.name else 1
    if wanted in family:
        return 2 if name == entry.name else NO_MATCH
    return 3 if wanted in name.lower() else NO_MATCH


def _model_document(entry: CatalogEntry, name: str) -> dict[str, Any]:
    """`n_active_parameters` are the parameters one token uses, `weight_bytes` the bytes of all in `default_dtype`."""
    model = read_model(name)
    n_total, n_active, _ = n_parameters(model)
    return {
        "id": name,
        "same_sizes": [one for one in entry.ids if one != name],
        "family": model.family.value,
        "n_parameters": n_total,
        "n_active_parameters": n_active,
        **picked(model, "n_layers", "max_position"),
        "default_dtype": model.default_weight_dtype,
        "weight_bytes": device_weight_bytes(model, Plan(), model.default_weight_dtype),
        "source": entry.source,
    }


def _scaled(value: float | None, scale: float, unit: str) -> str:
    """A rate or a size in whole units, one decimal below ten; `?` if unknown."""
    if value is None:
        return "?"
    n = value / scale
    return f"{n:,.0f} {unit}" if n >= 10 else f"{n:.1f} {unit}"
