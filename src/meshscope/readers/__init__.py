"""Readers of HLO text and of profiles."""
