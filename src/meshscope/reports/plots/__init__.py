"""Plots of runs as PNG and SVG files for papers; needs matplotlib (the `plots` extra)."""
