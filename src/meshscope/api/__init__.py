"""The Python API: predict, compile, run, import, open and compare runs."""
