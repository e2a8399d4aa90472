"""Holds the pages that show real output to what the commands print now.

Compilers of other versions choose other algorithms, so that the comparison runs only with the
versions that the README names; with others this says so and passes.
"""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

PAGES = [
    "README.md",
    "docs/table.md",
    "docs/metrics.md",
    "docs/sql.md",
    "docs/compare.md",
    "docs/moe.md",
    "docs/fsdp.md",
    "docs/torchxla.md",
    "docs/time.md",
]


def versions_in(page: Path) -> dict[str, str]:
    """Versions of the compiler and its libraries that a page names, by package."""
    line = re.search(r"^versions .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    pairs = re.findall(r"(jax|jaxlib|libtpu) (\S+?)(?:,|$)", line[0] if line else "")
    if not pairs:
        raise SystemExit(f"{page} names no versions. Run 'make readme'.")
    return dict(pairs)


def main() -> None:
    """Compares, or says why not."""
    made_with = versions_in(Path("README.md"))
    here = {name: version(name) for name in made_with}
    if here != made_with:
        sys.stdout.write(f"README was made with {made_with}; not compared with {here}\n")
        return
    command = [sys.executable, "-m", "cogapp", "-P", "--check", "--diff", *PAGES]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("The pages show other output. Run 'make readme' and read the difference.")


if __name__ == "__main__":
    main()
