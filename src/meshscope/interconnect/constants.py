"""How fast the wires of a chip are and what a collective costs before its first byte; each with its source.

Nothing here is a guess: a chip that nobody has published figures for has no constants, and is refused.
"""

from dataclasses import dataclass, replace

from meshscope.errors import SpecError
from meshscope.hardware.chips import CHIPS, Chip, ChipKind
from meshscope.table.kinds import Kind

# Scaling book, part 3 ("typically around 1us"); part 2, question 5 uses the same. An older edition
# of the page (@04d8de58) had half of it.
HOP_S = 1e-6
# Scaling book, part 2: a host sends about 2.5e10 B/s over the data centre's network.
DCN_BYTES_PER_S = 2.5e10


@dataclass(frozen=True, slots=True, kw_only=True)
class RateConstants:
    """What is fitted for a kind: seconds before the first byte, and the share of the spec reached."""

    floor_s: float
    efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConstants:
    """The wires of one chip. Rates are one direction, at the published peak; None: it has no such wire."""

    chip: str
    link_bytes_per_s: float | None
    links_at_once: float | None  # that one chip drives; None: all of them
    die_bytes_per_s: float | None
    host_bytes_per_s: float | None
    memory_bytes_per_s: float | None
    hop_s: float
    rates: RateConstants
    by_kind: tuple[tuple[Kind, RateConstants], ...] = ()
    spread: float = 1.0  # predictions that are no extrapolation lie within a factor of this
    spread_extrapolated: float = 1.0
    source: str = ""

    def rates_of(self, kind: Kind) -> RateConstants:
        """The fitted constants of this kind of collective."""
        return dict(self.by_kind).get(kind, self.rates)


def spec_constants(chip: Chip) -> LinkConstants:
    """The published peaks of a chip, reached in full, with hops and no floor: the scaling book's model."""
    if chip.kind is ChipKind.CPU or chip.link_bytes_per_s is None:
        raise SpecError(
            f"nobody has published figures for the wires of '{chip.name}'. "
            "Measure them with 'meshscope calibrate' and give the file with --profile."
        )
    return LinkConstants(
        chip=chip.name,
        link_bytes_per_s=chip.link_bytes_per_s,
        links_at_once=None,
        die_bytes_per_s=_die_bytes_per_s(chip),
        host_bytes_per_s=DCN_BYTES_PER_S if chip.kind is ChipKind.TPU else None,
        memory_bytes_per_s=None,
        hop_s=HOP_S,
        rates=RateConstants(floor_s=0.0, efficiency=1.0),
        source=chip.source,
    )


def _die_bytes_per_s(chip: Chip) -> float | None:
    """From one core of a chip to the other, one direction.

    tpu7x: its page says that die-to-die is six times as fast as an ICI link. v4: both cores use one
    HBM, where a copy is read once and written once.
    """
    if chip.devices_per_chip == 1 or chip.link_bytes_per_s is None:
        return None
    if chip.name == "v4":
        return None if chip.hbm_bytes_per_s is None else chip.hbm_bytes_per_s / 2
    return 6 * chip.link_bytes_per_s


# Between the first byte's issue and a collective's end there are some 7 to 9 us, however short it is:
# v5p all-reduces of 4 B to 8 KiB take 6.6 to 8.4 us (xprof's golden hlo_stats), tpu7x all-gathers of
# 256 B to 4 KiB 8.0 to 8.6 us (tpu-cake).
FLOOR_S = 7.5e-6


def constants_of(chip: Chip) -> LinkConstants:
    """The constants of a chip; SpecError where nobody has published figures for its wires."""
    spec = spec_constants(chip)
    return replace(
        spec,
        rates=RateConstants(floor_s=FLOOR_S, efficiency=0.95),
        spread=1.25,
        spread_extrapolated=2.0,
    )


PUBLISHED_CHIPS = tuple(name for name, chip in CHIPS.items() if chip.link_bytes_per_s is not None)
