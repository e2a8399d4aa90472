"""Compilers and live devices, each driven from worker processes."""
