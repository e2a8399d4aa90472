"""Prints a command and its real output as a Markdown block, for cog."""

import os
import re
import shlex
import subprocess
import sys

WIDTH = "100"


def shown(command: str, *, sections: tuple[str, ...] = ()) -> None:
    """Runs `command` and prints it with its standard output.

    With `sections`, prints only the blocks (separated by empty lines) that start with one of these texts,
    and `...` for the others.
    """
    environment = os.environ | {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    words = shlex.split(command)
    if words[0] == "meshscope":  # installed beside this Python, not always on PATH
        words[:1] = [sys.executable, "-m", "meshscope"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"'{command}' exited with {done.returncode}")
    text = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
    text = re.sub(r"python (\d+\.\d+)\.\d+", r"python \1", text)  # patch releases print the same
    if sections:
        text = _selected(text, sections)
    sys.stdout.write(f"```console\n$ {command}\n{text}\n```\n")


def _selected(text: str, sections: tuple[str, ...]) -> str:
    """The blocks that start with one of `sections`; raises SystemExit if one of them is missing."""
    blocks = text.split("\n\n")
    for section in sections:
        if not any(block.lstrip().startswith(section) for block in blocks):
            raise SystemExit(f"the output has no section '{section}'")
    kept = [block if block.lstrip().startswith(sections) else "..." for block in blocks]
    joined = "\n\n".join(kept)
    return re.sub(r"(?:\.\.\.\n\n)+\.\.\.", "...", joined)
