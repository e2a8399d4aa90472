"""What a collective costs on the wires between chips: geometry, strategies, bytes on every link, seconds."""

from meshscope.interconnect.constants import LinkConstants, RateConstants
from meshscope.interconnect.geometry import GroupGeometry, geometry_of
from meshscope.interconnect.lines import CollectiveLine, collective_lines
from meshscope.interconnect.loads import LinkLoad, link_loads
from meshscope.interconnect.seconds import ModeledTime, collective_seconds, collective_time
from meshscope.interconnect.stored import constants_of

__all__ = [
    "CollectiveLine",
    "GroupGeometry",
    "LinkConstants",
    "LinkLoad",
    "ModeledTime",
    "RateConstants",
    "collective_lines",
    "collective_seconds",
    "collective_time",
    "constants_of",
    "geometry_of",
    "link_loads",
]
