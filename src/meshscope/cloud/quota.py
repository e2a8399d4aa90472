"""The TPUs that a project may use, from a file, so that nothing else is rented by accident."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshscope.errors import ParseError, SpecError, nearest
from meshscope.files import read_file
from meshscope.hardware.chips import CHIPS
from meshscope.hardware.topology import Topology

KEYS = ("chip", "zone", "chips", "spot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Up to `chips` chips of one kind in a zone, as spot VMs or on demand."""

    chip: str
    zone: str
    chips: int
    spot: bool

    def __str__(self) -> str:
        """The quota in words."""
        return f"{self.chips} {_kind(is_spot=self.spot)} {self.chip} chips in {self.zone}"


def read_quota(path: Path) -> tuple[Quota, ...]:
    """The quota in a TOML file of `[[quota]]` tables with chip, zone, chips and spot; ParseError if malformed."""
    try:
        document = tomllib.loads(read_file(path).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ParseError(
            f"cannot read the quota file '{path}': {reason}. Give TOML with [[quota]] tables."
        ) from error
    tables = document.get("quota")
    if not isinstance(tables, list) or not tables:
        raise ParseError(f"{path}: there is no [[quota]] table. Add one with {', '.join(KEYS)}.")
    return tuple(_quota(path, number, table) for number, table in enumerate(tables, start=1))


def _quota(path: Path, number: int, table: Any) -> Quota:
    where = f"{path}: [[quota]] number {number}"
    if not isinstance(table, dict):
        raise ParseError(f"{where} is no table. Give it {', '.join(KEYS)}.")
    for key in table:
        if key not in KEYS:
            raise ParseError(f"{where}: unknown key '{key}'. {nearest(key, KEYS)}")
    types = {"chip": str, "zone": str, "chips": int, "spot": bool}
    for key, kind in types.items():
        value = table.get(key)
        if type(value) is not kind:
            raise ParseError(f"{where}: {key} is {value!r}. Give it a {kind.__name__}.")
    if table["chip"] not in CHIPS:
        raise ParseError(
            f"{where}: unknown chip '{table['chip']}'. {nearest(table['chip'], CHIPS)}"
        )
    if table["chips"] < 1:
        raise ParseError(f"{where}: chips is {table['chips']}. Give at least 1.")
    return Quota(**table)


def check_quota(
    quotas: Sequence[Quota], topology: Topology, zone: str, *, is_spot: bool, n_used: int = 0
) -> None:
    """SpecError unless the quota covers the slice beside the `n_used` chips that the project already has."""
    chip = topology.chip.name
    granted = [q for q in quotas if (q.chip, q.zone, q.spot) == (chip, zone, is_spot)]
    n_granted = sum(quota.chips for quota in granted)
    if topology.n_chips + n_used <= n_granted:
        return
    asked = f"{topology.n_chips} {_kind(is_spot=is_spot)} {chip} chips in {zone}"
    if n_used and granted:
        raise SpecError(
            f"the quota has {n_granted - n_used} of {n_granted} {chip} chips in {zone} left, and "
            f"{topology.name} needs {topology.n_chips}. Delete another slice first."
        )
    same = [quota for quota in quotas if quota.chip == chip] or list(quotas)
    raise SpecError(
        f"the quota does not cover {asked}, which would be charged. "
        f"It covers {'; '.join(map(str, same))}."
    )


def _kind(*, is_spot: bool) -> str:
    return "spot" if is_spot else "on-demand"
