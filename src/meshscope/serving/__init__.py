"""Simulation of a serving engine under load: requests arrive, are batched, and finish."""
