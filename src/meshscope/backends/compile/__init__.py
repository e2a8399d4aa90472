"""Compiles programs with the TPU compiler on a machine without a TPU, in a child process."""
