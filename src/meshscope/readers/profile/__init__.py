"""Profiles made by others or by ourselves: read in columns, told apart, joined to the event table."""
