"""The constants of every chip as they were fitted, kept beside the code: fitting takes longer than predicting.

`tests/golden/make_constants.py` writes `fitted.json` from the published points; a test fits again and
compares.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from meshscope.events.enums import Kind
from meshscope.interconnect.constants import (
    KindRates,
    LinkConstants,
    MeasuredRange,
    RateConstants,
    Spreads,
    spec_constants,
)
from meshscope.interconnect.gpu import Protocol
from meshscope.spec.hardware.chips import Chip

FITTED = "fitted.json"


@cache
def constants_of(chip: Chip) -> LinkConstants:
    """The constants of a chip, with intervals; SpecError where nobody has published its wires."""
    spec_constants(chip)  # refuses first
    return constants_from_dict(_documents()[chip.name])


@cache
def _documents() -> Mapping[str, Any]:
    """What is kept, by the name of the chip."""
    return json.loads(files("meshscope.interconnect").joinpath(FITTED).read_text(encoding="utf-8"))


def _range(told: Mapping[str, Any]) -> MeasuredRange:
    fields: dict[str, Any] = {**told, "kind": Kind(told["kind"])}
    return MeasuredRange(**fields)


def constants_from_dict(told: Mapping[str, Any]) -> LinkConstants:
    """The constants that `asdict` made a document of."""
    by_kind = tuple(
        KindRates(
            kind=Kind(own["kind"]),
            rates=RateConstants(**own["rates"]),
            group_size=own["group_size"],
        )
        for own in told["by_kind"]
    )
    measured = tuple(map(_range, told["measured"]))
    spreads = told["spreads"]
    fields: dict[str, Any] = {
        **told,
        "rates": RateConstants(**told["rates"]),
        "by_kind": by_kind,
        "protocols": tuple(Protocol(**own) for own in told["protocols"]),
        "measured": measured,
        "spreads": None if spreads is None else Spreads(**spreads),
    }
    return LinkConstants(**fields)
