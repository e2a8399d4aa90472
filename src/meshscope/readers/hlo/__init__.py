"""Reads optimised HLO text: grammar, loops, groups, meaning and attribution of collectives."""
