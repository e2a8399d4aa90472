"""Makes the list of golden files, `goldens`, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "golden" / "hlo"))
