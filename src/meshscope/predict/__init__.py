"""Closed formulas: what a plan communicates, without JAX and without a compiler."""
