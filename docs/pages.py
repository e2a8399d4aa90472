"""The pages with generated blocks: `python docs/pages.py check` compares them with real output, `write` renews them.

The blocks are cog's: each runs a command, reads a CSV file or prints docstrings, so that a page cannot
show output that the commands no longer print.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILED = "docs/evidence/examples.md"  # shows the output of `make demo`, and names the versions


def pages() -> list[str]:
    """Every page of the project with a generated block."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(
        str(path.relative_to(ROOT)) for path in paths if "[[[cog" in path.read_text("utf-8")
    )


def main(mode: str) -> None:
    """Runs cog over all pages."""
    options = {"check": ["--check", "--diff"], "write": ["-r"]}[mode]
    if mode == "check":
        _check_versions()
    command = [sys.executable, "-m", "cogapp", "-P", *options]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # no page reads what another one wrote
        done = [pool.submit(subprocess.run, [*command, page], cwd=ROOT) for page in pages()]
    if any(page.result().returncode for page in done):
        raise SystemExit("Run 'make readme', then read the difference before you commit it.")


def _check_versions() -> None:
    """Other compilers choose other algorithms: a difference would say nothing about the page."""
    text = (ROOT / COMPILED).read_text("utf-8")
    line = re.search(r"^versions .*(?:\n {8,}.*)*", text, re.MULTILINE)
    if line is None:
        raise SystemExit(f"{COMPILED} shows no versions. Run 'make readme'.")
    shown = dict(re.findall(r"(jax|jaxlib|libtpu)\s+(\S+?)(?:,|$)", line[0]))
    installed = {name: version(name) for name in shown}
    if shown != installed:
        raise SystemExit(
            f"{COMPILED} shows output of {shown}, but {installed} is installed. "
            "Install the versions in constraints.txt, or run 'make readme'."
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
