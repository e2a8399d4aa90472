"""Time of a collective on the interconnect: group geometry, strategies, link loads, alpha-beta lines."""

from meshscope.hardware.interconnect.constants import LinkConstants, constants_of
from meshscope.hardware.interconnect.lines import collective_lines, collective_time, link_loads
from meshscope.hardware.interconnect.strategies import geometry_of

__all__ = [
    "LinkConstants",
    "collective_lines",
    "collective_time",
    "constants_of",
    "geometry_of",
    "link_loads",
]
