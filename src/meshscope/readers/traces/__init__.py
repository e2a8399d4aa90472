"""Reads traces recorded by other tools into one frame of columns, then into the event table.

A reader turns one file into a `Trace` (`trace.py`): executed ops in columns, a table of distinct
ops, steps, and findings about the quality of the capture. Its obligations:

- `events` has one row per op that a device executed, without rows that contain others.
  Times are integer nanoseconds. Events without a valid time are left out and counted in a finding.
- `ops` has one row per distinct op. A collective has a `kind`; what the trace does not say about
  it is null. `group` holds the global ranks of the group of the device that ran it.
- `steps` has one row per annotated step of the program, with the tokens that it processes.
- No Python object per event survives a batch of a file.

`merge.py` puts the traces of all files on one clock and one numbering of devices; `groups.py` gives
the collectives their axis; `attribution.py` assigns steps and phases and makes event table rows.
"""

from functools import cache
from typing import Any

from meshscope.files import own_table


@cache
def names(table: str) -> dict[str, Any]:
    """A table of `names.toml`: names that other tools use, and patterns of them."""
    return own_table("readers/traces/names.toml")[table]


@cache
def meanings(table: str) -> dict[str | None, str]:
    """The meaning of each name in a table of `names.toml` that lists names by their meaning."""
    return {name: meaning for meaning, listed in names(table).items() for name in listed}
