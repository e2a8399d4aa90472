"""The head of a Kineto trace: rank, world size, process groups, device and clock."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from meshscope.readers.traces.columns import MAX_NS, MAX_RANKS
from meshscope.readers.traces.json_stream import FAULTS
from meshscope.readers.traces.trace import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoHead:
    """What a trace says about its process; None if it does not say."""

    rank: int | None = None
    world_size: int | None = None
    device_name: str | None = None
    origin_unix_ns: int | None = None
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict[str, ProcessGroup])

    @classmethod
    def of(cls, head: Mapping[str, Any]) -> Self:
        """The facts in the top-level keys of the trace."""
        distributed = _mapping(head.get("distributedInfo"))
        properties = head.get("deviceProperties")
        devices = properties if isinstance(properties, list) else []
        names = [device.get("name") for device in devices if isinstance(device, dict)]
        groups = distributed.get("pg_config")
        listed = [_group(_mapping(group)) for group in groups] if isinstance(groups, list) else []
        return cls(
            rank=_number_of_ranks(distributed.get("rank")),
            world_size=_number_of_ranks(distributed.get("world_size")),
            device_name=next((name for name in names if isinstance(name, str) and name), None),
            origin_unix_ns=_whole(head.get("baseTimeNanoseconds")),
            groups={group.name: group for group in listed if group is not None},
        )


def ranks_of(value: object) -> tuple[int, ...] | None:
    """The ranks in `[0, 1]`, as text or list; None if the list is abridged or is none."""
    if isinstance(value, str):
        if not re.fullmatch(r"\[[\d,\s]*\]", value):
            return None
        value = [int(number) for number in re.findall(r"\d{1,9}", value)]
    if not isinstance(value, list) or not value or len(value) > MAX_RANKS:
        return None
    ranks = tuple(rank for rank in value if isinstance(rank, int) and 0 <= rank < MAX_RANKS)
    return ranks if len(ranks) == len(value) else None


def _group(values: Mapping[str, Any]) -> ProcessGroup | None:
    name = values.get("pg_name")
    if not isinstance(name, str | int):
        return None
    description = values.get("pg_desc")
    return ProcessGroup(
        name=str(name),
        description=description if isinstance(description, str) else None,
        ranks=ranks_of(values.get("ranks")),
        size=_whole(values.get("pg_size")),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except FAULTS:
            return {}
    return value if isinstance(value, dict) else {}


def _number_of_ranks(value: object) -> int | None:
    """A rank or a number of ranks; None if no job has so many."""
    number = _whole(value)
    return number if number is not None and number < MAX_RANKS else None


def _whole(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < MAX_NS else None
