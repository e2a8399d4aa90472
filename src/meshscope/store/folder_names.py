"""Default names of run folders, safe as path components."""

import re
from pathlib import Path

RUNS = Path("runs")
MAX_NAME = 120  # leaves room for the suffix of a partial folder below the 255 bytes of file systems


def default_folder(*parts: str) -> Path:
    """`runs/<parts joined by ->`, each reduced to letters, digits and `._-`."""
    return RUNS / safe_name("-".join(filter(None, parts)))


def safe_name(text: str) -> str:
    """The text as one path component: other characters become `-`, no leading dot, never empty."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")
    return name[:MAX_NAME] or "run"
