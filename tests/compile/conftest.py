"""Lets the tests of compiled programs share modules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for compared and small_configs
