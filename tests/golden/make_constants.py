"""Writes the constants that are fitted on published points to where the model reads them.

Run it with `make constants` after a change of the points, of a chip's figures or of the fit, and read
the difference.
"""

import json
from dataclasses import asdict
from pathlib import Path

from meshscope.errors import SpecError
from meshscope.interconnect import stored
from meshscope.interconnect.fitted import fit_constants
from meshscope.spec.hardware.chips import CHIPS

PATH = Path(stored.__file__).with_name(stored.FITTED)


def main() -> None:
    """Writes `fitted.json`."""
    found = {}
    for name, chip in CHIPS.items():
        try:
            found[name] = asdict(fit_constants(chip))
        except SpecError:
            continue  # nobody has published its wires
    PATH.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
