"""The pages with generated blocks: `python docs/pages.py check` compares them with real output, `write` renews them.

The blocks are cog's: each runs a command, reads a CSV file or prints docstrings, so that a page cannot
show output that the commands no longer print. `picture` draws the top of the report and the moving picture on top of
the README again, with Chromium; they keep the answer in the README that they belong to, and `check` compares it.
"""

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "report" / "top.png"
MINUTE = ROOT / "docs" / "report" / "minute.gif"
COMPILED = "docs/evidence/examples.md"  # shows the output of `make demo`, and names the versions


def pages() -> list[str]:
    """Every page of the project with a generated block."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(
        str(path.relative_to(ROOT)) for path in paths if "[[[cog" in path.read_text("utf-8")
    )


def main(mode: str) -> None:
    """Runs cog over all pages, or draws the picture."""
    if mode == "picture":
        _draw_picture()
        return
    options = {"check": ["--check", "--diff"], "write": ["-r"]}[mode]
    if mode == "check":
        _check_versions()
        shown = {
            PICTURE: Image.open(PICTURE).info.get("answer"),
            MINUTE: Image.open(MINUTE).info.get("comment", b"").decode("utf-8"),
        }
        for path, answer in shown.items():
            if answer != _answer():
                raise SystemExit(
                    f"{path} shows another answer. Run 'python docs/pages.py picture'."
                )
    command = [sys.executable, "-m", "cogapp", "-P", *options]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # no page reads what another one wrote
        done = [pool.submit(subprocess.run, [*command, page], cwd=ROOT) for page in pages()]
    if any(page.result().returncode for page in done):
        raise SystemExit("Run 'make readme', then read the difference before you commit it.")


def _answer() -> str:
    """The answer of `make demo` in the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    _, command, rest = text.partition("$ meshscope show runs/demo --rows\n")
    assert command, "README.md does not show the command"
    return rest.partition("\n\n")[0]


def _draw_picture() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "report.html", Path(folder) / "top.png"
        subprocess.run(["meshscope", "report", "runs/demo", "--out", page], cwd=ROOT, check=True)
        look = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,755"]
        chromium = ["chromium", *look, "--virtual-time-budget=8000", f"--screenshot={shot}"]
        subprocess.run([*chromium, page.as_uri()], check=True)
        answer = PngInfo()
        answer.add_itxt("answer", _answer())
        Image.open(shot).quantize().save(PICTURE, pnginfo=answer, optimize=True)
        minute: Any = import_module("minute")

        explorer = Path(folder) / "explorer.html"
        subprocess.run([*minute.EXPLORE.split(), "--out", explorer], cwd=ROOT, check=True)
        minute.draw(_answer(), page, explorer, MINUTE)


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
