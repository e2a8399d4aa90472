"""Plots of a run for papers, each as PNG and as SVG, drawn by matplotlib (the extra `plots`)."""
