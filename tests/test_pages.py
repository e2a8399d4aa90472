"""The tables of pages are those that CSV files, or the model, give now."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["docs/moe.md", "docs/fsdp.md", "docs/accuracy.md"])
def test_tables_are_those_of_the_csv_files(page: str):
    command = [sys.executable, "-m", "cogapp", "-P", "--check", "--diff", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run 'make readme' (or 'make accuracy') and read the difference:\n{done.stdout}"
