"""Lets the tests of compiled programs share modules and processes."""

import sys
from pathlib import Path

from kept_workers import _kept_workers, processes

__all__ = ["_kept_workers", "processes"]

sys.path.insert(0, str(Path(__file__).parent))  # for compared and small_configs
