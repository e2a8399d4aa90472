"""Metrics, comparisons and explanations: pure functions over event tables."""
