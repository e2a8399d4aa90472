"""Makes `goldens`, the list of golden files, importable by the tests of the reader."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "golden" / "hlo"))
