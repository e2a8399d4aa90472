"""Runs an experiment on live devices, times and profiles it, and reads the profile."""
