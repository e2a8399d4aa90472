"""Runs an experiment on live devices, times it, profiles it, and reads the profile into the table."""
