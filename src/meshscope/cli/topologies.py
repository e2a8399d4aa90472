"""`meshscope topologies`: chips, and the standard slices of one."""

from typing import Annotated

import typer

from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.errors import SpecError
from meshscope.hardware.chips import ChipKind, chip_of
from meshscope.hardware.slices import every_slice, standard_slices
from meshscope.reports.choices import chip_table, slice_document, slice_table

HBM_NOTE = "HBM: what programs may use."
LINK_NOTE = "Link: one ICI or NVLink link, one direction."
FORMS_NOTE = "Also chip grids (v6e:2x4), several slices (2xv6e:4x4) and CPU devices (cpu:8)."
SLICE_NOTE = "Wraps: dimensions that close into a ring."


def command(
    chip: Annotated[
        str | None, typer.Argument(metavar="CHIP", help="A TPU, to list its slices.")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List chips and slices: HBM, peaks and links.

    With --json, one object per standard slice.
    """
    tpu = None if chip is None else chip_of(chip)
    if tpu is not None and tpu.kind is not ChipKind.TPU:
        raise SpecError(
            f"{tpu.name} has no standard slices; give a number of devices, like {tpu.name}:8."
        )
    if as_json:
        slices = every_slice() if tpu is None else standard_slices(tpu)
        print_json([slice_document(topology) for topology in slices])
        return
    if tpu is None:
        print_all(new_console(), [chip_table(), "", f"{HBM_NOTE} {LINK_NOTE}", FORMS_NOTE])
    else:
        print_all(new_console(), [slice_table(tpu), "", f"{HBM_NOTE} {SLICE_NOTE}"])
