"""The option `--profile`: a chip profile that `calibrate` wrote, in place of published figures."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.errors import SpecError
from meshscope.interconnect.profile import ChipProfile, load_profile
from meshscope.spec.hardware.chips import Chip

ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="Times by this chip profile, which calibrate wrote."
    ),
]


def asked_profile(path: Path | None, chip: Chip | None) -> ChipProfile | None:
    """The profile in the file; SpecError when it is of another chip."""
    if path is None:
        return None
    profile = load_profile(path)
    if chip is not None and profile.chip != chip.name:
        raise SpecError(
            f"--profile {path} is of '{profile.chip}', and the topology is of '{chip.name}'. "
            f"Give a profile of '{chip.name}', or another --topology."
        )
    return profile
