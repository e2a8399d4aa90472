"""Chips and slices: published figures, each with its source."""
