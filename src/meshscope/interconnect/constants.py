"""How fast the wires of a chip are and what a collective costs before its first byte; each with its source.

Nothing here is a guess: a chip that nobody has published figures for has no constants, and is refused.
"""

from dataclasses import dataclass
from math import log

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.interconnect.gpu import Protocol, gpu_network_bytes_per_s
from meshscope.spec.hardware.chips import Chip, ChipKind

# Scaling book, part 3 ("typically around 1us"); part 2, question 5 uses the same. An older edition
# of the page (@04d8de58) had half of it.
HOP_S = 1e-6
# Scaling book, part 2: a host sends about 2.5e10 B/s over the data centre's network.
DCN_BYTES_PER_S = 2.5e10


@dataclass(frozen=True, slots=True, kw_only=True)
class RateConstants:
    """What is fitted: seconds before the first byte, and the share of the published peak reached."""

    floor_s: float
    efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRates:
    """Constants of one kind of collective, over groups of one size where `group_size` says so."""

    kind: Kind
    rates: RateConstants
    group_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRange:
    """What was measured of a kind: payloads from and to, and sizes of groups from and to."""

    kind: Kind
    min_payload_bytes: int
    max_payload_bytes: int
    min_group_size: int
    max_group_size: int

    def holds(self, kind: Kind, payload_bytes: float, group_size: int) -> bool:
        """Whether such a collective lies between measured ones."""
        return (
            kind is self.kind
            and self.min_payload_bytes <= payload_bytes <= self.max_payload_bytes
            and self.min_group_size <= group_size <= self.max_group_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreads:
    """Factors within which 90 of 100 predictions lie of the truth, and how many errors tell each.

    `short`: the floor or the hops take longer than the bytes; `long`: the bytes do; `unseen`: outside
    of what was measured.
    """

    short: float
    n_short: int
    long: float
    n_long: int
    unseen: float
    n_unseen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConstants:
    """The wires of one chip. Rates are one direction, at the published peak; None: it has no such wire.

    `spreads` make the intervals of predictions that lie between measured ones (`measured`), and of
    others; None where nothing judged the fit.
    """

    chip: str
    link_bytes_per_s: float | None
    links_at_once: float | None  # that one chip drives; None: all of them
    die_bytes_per_s: float | None
    host_bytes_per_s: float | None  # of a TPU host; of one GPU
    memory_bytes_per_s: float | None  # of virtual devices that share one
    hop_s: float
    rates: RateConstants
    by_kind: tuple[KindRates, ...] = ()
    protocols: tuple[Protocol, ...] = ()  # of NCCL
    measured: tuple[MeasuredRange, ...] = ()
    spreads: Spreads | None = None
    source: str = ""

    def rates_of(self, kind: Kind, group_size: int) -> RateConstants:
        """The constants of this kind: of groups of this size, else of any size, else of the nearest."""
        of_kind = [own for own in self.by_kind if own.kind is kind]
        if not of_kind:
            return self.rates
        return min(of_kind, key=lambda own: _distance(own.group_size, group_size)).rates

    def is_measured(self, kind: Kind, payload_bytes: float, group_size: int) -> bool:
        """Whether the collective lies between measured ones of this chip."""
        return any(own.holds(kind, payload_bytes, group_size) for own in self.measured)


def _distance(told: int | None, group_size: int) -> tuple[int, float]:
    if told == group_size:
        return (0, 0.0)
    return (1, 0.0) if told is None else (2, abs(log(told / group_size)))


def spec_constants(chip: Chip) -> LinkConstants:
    """The published peaks of a chip, reached in full, with hops and no floor: the scaling book's model."""
    if chip.kind is ChipKind.CPU or chip.link_bytes_per_s is None:
        raise SpecError(
            f"nobody has published figures for the wires of '{chip.name}'. "
            "Measure them with 'meshscope calibrate' and give the file with --profile."
        )
    is_tpu = chip.kind is ChipKind.TPU
    return LinkConstants(
        chip=chip.name,
        link_bytes_per_s=chip.link_bytes_per_s,
        links_at_once=None,
        die_bytes_per_s=_die_bytes_per_s(chip),
        host_bytes_per_s=DCN_BYTES_PER_S if is_tpu else gpu_network_bytes_per_s(chip.name),
        memory_bytes_per_s=None,
        hop_s=HOP_S if is_tpu else 0.0,
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
