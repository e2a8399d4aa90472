"""Installs packages with uv under pip's settings: `python tools/install.py PYTHON ARGUMENTS`.

uv unpacks packages in parallel and compiles none, so it needs half of pip's time or less.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # meshscope is not installed yet

from meshscope.programs.environments import pip_settings  # noqa: E402


def main(python: str, *arguments: str) -> None:
    """Exits with the status of uv, which is installed next to this Python."""
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--python", python, *arguments]
    # On the disk of the environments, so that they share their files with it.
    variables = {"UV_CACHE_DIR": str(ROOT / ".cache" / "uv")} | pip_settings() | os.environ
    sys.exit(subprocess.run(command, env=variables, check=False).returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
