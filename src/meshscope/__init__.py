"""See every byte that a large language model moves across a TPU slice, before you rent one."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshscope.api.runs import RunSet

__version__ = "0.1.0"


def open(pattern: str) -> "RunSet":  # noqa: A001  meshscope.open("runs/*") reads as it acts
    """The runs at this path, or that this pattern matches, as tables for Python and notebooks."""
    return import_module("meshscope.api.runs").open_runs(pattern)
