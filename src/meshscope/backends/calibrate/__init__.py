"""Measures collectives, matrix products and memory on live devices, and fits the constants of a chip."""
