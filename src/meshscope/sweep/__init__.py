"""Sweeps: many experiments of one file, each a run of its own, made once and for all."""
