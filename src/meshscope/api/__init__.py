"""The Python API: functions that return runs."""
