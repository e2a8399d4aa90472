"""What a collective costs on the wires between chips: geometry, strategies, bytes on every link, seconds."""

from meshscope.interconnect.constants import LinkConstants, RateConstants, constants_of
from meshscope.interconnect.geometry import GroupGeometry, geometry_of
from meshscope.interconnect.loads import LinkLoad, link_loads
from meshscope.interconnect.seconds import (
    CollectiveTime,
    collective_lines,
    collective_seconds,
    collective_time,
)

__all__ = [
    "CollectiveTime",
    "GroupGeometry",
    "LinkConstants",
    "LinkLoad",
    "RateConstants",
    "collective_lines",
    "collective_seconds",
    "collective_time",
    "constants_of",
    "geometry_of",
    "link_loads",
]
