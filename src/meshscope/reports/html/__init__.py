"""The HTML report: one self-contained file for one run, or for several runs side by side."""
