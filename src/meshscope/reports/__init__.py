"""Renders tables, metrics and charts as terminal text, HTML, notebooks and plots."""
