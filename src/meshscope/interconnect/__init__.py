"""Time of a collective on the interconnect: group geometry, strategies, link loads, alpha-beta lines."""

from meshscope.interconnect.constants import LinkConstants, RateConstants, constants_of
from meshscope.interconnect.geometry import GroupGeometry, geometry_of
from meshscope.interconnect.lines import CollectiveLine, collective_lines
from meshscope.interconnect.time_model import LinkLoad, ModeledTime, collective_time, link_loads

__all__ = [
    "CollectiveLine",
    "GroupGeometry",
    "LinkConstants",
    "LinkLoad",
    "ModeledTime",
    "RateConstants",
    "collective_lines",
    "collective_time",
    "constants_of",
    "geometry_of",
    "link_loads",
]
