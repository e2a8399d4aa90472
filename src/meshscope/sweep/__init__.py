"""Sweeps: the experiments of one file, each a run, resumed after interruptions."""
