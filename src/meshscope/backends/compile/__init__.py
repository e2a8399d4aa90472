"""Compiles experiments and saved graphs in worker processes, without the target hardware."""
