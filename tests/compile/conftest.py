"""Lets the tests of compiled programs share a module."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for compared
