"""`meshscope models` and `meshscope topologies`: the models, chips and slices that are known."""

from meshscope.api.console import Shown
from meshscope.api.options import option
from meshscope.errors import SpecError
from meshscope.hardware.chips import ChipKind, chip_of
from meshscope.hardware.topology import every_slice, standard_slices
from meshscope.reports.choices import (
    chip_table,
    model_documents,
    model_table,
    slice_document,
    slice_table,
)

MODELS_NOTE = (
    "By owner, family and size. Params: all, and those that one token uses. Length:\n"
    "the longest sequence. Weights: their format by default. A search also lists\n"
    "variants, such as -FP8. Any config.json of these families works, too: give its\n"
    "path as MODEL."
)


def models(
    *,
    search: str = option("SEARCH: Part of an id or of a family's name.", default="", kw_only=False),
) -> Shown:
    """List or search the models of the catalog."""
    documents = model_documents(search)
    return Shown(lambda: documents, lambda _: [model_table(documents), "", MODELS_NOTE])


HBM_NOTE = "HBM: what programs may use."
LINK_NOTE = "Link: one ICI or NVLink link, one direction."
FORMS_NOTE = "Also chip grids (v6e:2x4), several slices (2xv6e:4x4) and CPU devices (cpu:8)."
SLICE_NOTE = "Wraps: dimensions that close into a ring."


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
        slices, notes = every_slice, (f"{HBM_NOTE} {LINK_NOTE}", FORMS_NOTE)
        return Shown(lambda: [*map(slice_document, slices())], lambda _: [chip_table(), "", *notes])
    return Shown(
        lambda: [*map(slice_document, standard_slices(tpu))],
        lambda _: [slice_table(tpu), "", f"{HBM_NOTE} {SLICE_NOTE}"],
    )
