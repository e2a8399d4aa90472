"""Time of a collective on the interconnect: group geometry, strategies, link loads, alpha-beta lines."""
