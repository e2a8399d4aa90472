"""Reads optimized HLO text: its grammar, loops, groups, and the collectives with their attribution."""
