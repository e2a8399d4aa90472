"""Pages made from CSV files, from the model and from docstrings show what those say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "docs/moe.md",
        "docs/fsdp.md",
        "docs/torchxla.md",
        "docs/accuracy.md",
        "docs/metrics.md",
        "docs/sql.md",
        "docs/time.md",
    ],
)
def test_pages_show_what_they_are_made_of(page: str):
    command = [sys.executable, "-m", "cogapp", "-P", "--check", "--diff", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"run 'make readme' (or 'make accuracy') and read the difference:\n{done.stdout}"
    )
