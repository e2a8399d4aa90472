"""The stored constants equal a fresh fit."""

from dataclasses import replace

import pytest
from fit_collectives import fit_constants

from meshscope.errors import SpecError
from meshscope.hardware.chips import CHIPS, Chip
from meshscope.hardware.interconnect.constants import LinkConstants, constants_of

# Chips with published wires.
KNOWN = [chip for chip in CHIPS.values() if chip.link_bytes_per_s]


@pytest.mark.parametrize("chip", KNOWN, ids=lambda chip: chip.name)
def test_stored_constants_equal_the_fit(chip: Chip) -> None:
    stored, fitted = constants_of(chip), fit_constants(chip)
    assert _figures(stored) == pytest.approx(_figures(fitted), rel=1e-9)
    assert (stored.source, stored.measured, stored.protocols) == (
        fitted.source,
        fitted.measured,
        fitted.protocols,
    )


def test_a_new_chip_is_refused_until_its_constants_are_fitted() -> None:
    with pytest.raises(SpecError, match=r"v9 are fitted\. Run 'make constants'"):
        constants_of(replace(CHIPS["v6e"], name="v9"))


def _figures(constants: LinkConstants) -> dict[str, float]:
    spreads = constants.spreads
    rates = {"any": constants.rates, **{entry.kind: entry.rates for entry in constants.by_kind}}
    figures = {
        **{f"{name} latency": rate.latency_s for name, rate in rates.items()},
        **{f"{name} efficiency": rate.efficiency for name, rate in rates.items()},
        "links": constants.links_at_once,
        "host": constants.host_bytes_per_s,
        "die": constants.die_bytes_per_s,
        "hop": constants.hop_s,
        "short": None if spreads is None else spreads.short,
        "long": None if spreads is None else spreads.long,
        "unseen": None if spreads is None else spreads.out_of_sample,
    }
    return {name: -1.0 if value is None else value for name, value in figures.items()}
