"""Runs as a database: views over their tables, from the command line and from Python."""
