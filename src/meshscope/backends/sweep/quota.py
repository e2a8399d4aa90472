"""What a project may use of Google Cloud's TPUs, and what it uses already."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from meshscope.errors import ParseError, SpecError, nearest
from meshscope.files import read_text
from meshscope.hardware.chips import CHIPS, Chip
from meshscope.hardware.topology import Topology
from meshscope.serialize import FormatError, from_plain

# States of a node or request that has no chips, or none any more.
WITHOUT_CHIPS = ("SUSPENDED", "FAILED", "PREEMPTED", "TERMINATED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Up to `chips` chips of one kind in a zone, as spot VMs or on demand."""

    chip: str
    zone: str
    chips: int
    spot: bool

    def __post_init__(self) -> None:
        """FormatError for an unknown chip or no chips."""
        if self.chip not in CHIPS:
            raise FormatError(f"unknown chip '{self.chip}'. {nearest(self.chip, CHIPS)}")
        if self.chips < 1:
            raise FormatError(f"chips is {self.chips}. Give at least 1.")

    def __str__(self) -> str:
        kind = "spot" if self.spot else "on-demand"
        return f"{self.chips} {kind} {self.chip} chips in {self.zone}"


def read_quota(path: Path) -> tuple[Quota, ...]:
    """The quota in a TOML file of `[[quota]]` tables with chip, zone, chips and spot; ParseError if malformed."""
    remedy = f"Give TOML with [[quota]] tables of {', '.join(Quota.__slots__)}."
    try:
        document = tomllib.loads(read_text(path, remedy))
    except tomllib.TOMLDecodeError as error:
        raise ParseError(f"{path}: not TOML: {error}. {remedy}") from error
    try:
        return from_plain(tuple[Quota, ...], document.get("quota"), "quota")
    except FormatError as error:
        raise ParseError(f"{path}: {error}. {remedy}") from error


def check_quota(
    quotas: Sequence[Quota], topology: Topology, zone: str, *, is_spot: bool, n_used: int = 0
) -> None:
    """SpecError unless the quota covers the slice plus the `n_used` chips that the project already has."""
    chip = topology.chip.name
    granted = [q for q in quotas if (q.chip, q.zone, q.spot) == (chip, zone, is_spot)]
    n_granted = sum(quota.chips for quota in granted)
    if topology.n_chips + n_used <= n_granted:
        return
    if n_used and granted:
        raise SpecError(
            f"the quota has {n_granted - n_used} of {n_granted} {chip} chips in {zone} left, and "
            f"{topology.name} needs {topology.n_chips}. Delete another slice first."
        )
    same = [quota for quota in quotas if quota.chip == chip] or list(quotas)
    asked = Quota(chip=chip, zone=zone, chips=topology.n_chips, spot=is_spot)
    raise SpecError(
        f"the quota does not cover {asked}, which would be charged. "
        f"It covers {'; '.join(map(str, same))}."
    )


def n_chips_in_use(
    nodes: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
    chip: Chip,
    *,
    is_spot: bool,
) -> int:
    """Chips of this kind that nodes have, and that queued resources wait for.

    Nodes count however they were made; a queued resource counts for the nodes that do not exist yet.
    Source: `projects.locations.nodes` and `projects.locations.queuedResources` of the Cloud TPU API v2.
    """
    names = {str(node.get("name", "")).rpartition("/")[2] for node in nodes}
    used: list[Mapping[str, Any]] = []
    for node in nodes:
        how = node.get("schedulingConfig") or {}
        is_of_kind = bool(how.get("spot") or how.get("preemptible")) is is_spot
        used += [node] if is_of_kind and node.get("state") not in WITHOUT_CHIPS else []
    for request in requests:
        state = (request.get("state") or {}).get("state")
        if state not in WITHOUT_CHIPS and ("spot" in request) is is_spot:
            used += [node for name, node in _requested_nodes(request) if name not in names]
    return sum(_n_chips(node, chip) for node in used)


def _requested_nodes(request: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names of the nodes that a queued resource asks for, and what they are."""
    for spec in (request.get("tpu") or {}).get("nodeSpec") or []:
        several = spec.get("multisliceParams") or {}
        name = several.get("nodeIdPrefix") or spec.get("nodeId") or ""
        n = int(several.get("nodeCount") or 0)
        for one in [f"{name}-{i}" for i in range(n)] or [name]:
            yield one, spec.get("node") or {}


def _n_chips(node: Mapping[str, Any], chip: Chip) -> int:
    """The chips of a node by its grid, else by its accelerator type; 0 if they are of another kind."""
    config = node.get("acceleratorConfig") or {}
    kind, _, size = str(node.get("acceleratorType", "")).rpartition("-")
    kind = str(config.get("type") or kind).replace("_", "").lower()
    if chip.accelerator is None or kind != chip.accelerator:
        return 0
    if grid := config.get("topology"):
        return prod(int(n) for n in str(grid).split("x"))
    return int(size) // (2 if chip.name_counts_cores else 1)
