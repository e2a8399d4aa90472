"""Prints a command and its real output as a Markdown block, for cog."""

import os
import re
import shlex
import subprocess
import sys

WIDTH = "80"


def shown(
    *commands: str,
    sections: tuple[str, ...] = (),
    blocks: int | None = None,
    sentences: int | None = None,
) -> None:
    """Runs the commands and prints them, with the standard output of the last one.

    With `sections`, prints only the blocks (separated by empty lines) that start with one of these texts,
    and `...` for the others; with `blocks`, only so many from the top; with `sentences`, only the top
    with so many lines that start with a dash.
    """
    text = [_output(command) for command in commands][-1]
    if sections:
        text = _selected(text, sections)
    if blocks is not None:
        top = text.split("\n\n")
        text = "\n\n".join([*top[:blocks], *["..."] * (len(top) > blocks)])
    if sentences is not None:
        parts = re.split(r"\n(?=- )", text)
        text = "\n".join([*parts[: sentences + 1], "..."])
    lines = [*(f"$ {_wrapped(command)}" for command in commands), *text.splitlines()]
    sys.stdout.write("```console\n" + "\n".join(lines) + "\n```\n")


def shown_python(code: str) -> None:
    """Runs Python code and prints it with its standard output."""
    sys.stdout.write(f"```python\n{code.strip()}\n```\n")
    text = _output(shlex.join([sys.executable, "-c", code]))
    sys.stdout.write(f"```text\n{text}\n```\n")


def _wrapped(command: str) -> str:
    """The command with line breaks before options, so that no line exceeds the width."""
    lines: list[str] = []
    for word in re.split(r" (?=--)", command):
        if lines and len(lines[-1]) + len(word) < int(WIDTH) - len(" \\"):
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}" if lines else word)
    return " \\\n".join(lines)


def _output(command: str) -> str:
    """The standard output of a command, without trailing blanks; SystemExit if it fails."""
    environment = os.environ | {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    words = shlex.split(command)
    if words[0] == "meshscope":  # installed beside this Python, not always on PATH
        words[:1] = [sys.executable, "-m", "meshscope"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"'{command}' exited with {done.returncode}")
    text = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
    return re.sub(r"python (\d+\.\d+)\.\d+", r"python \1", text)  # patch releases print the same


def _selected(text: str, sections: tuple[str, ...]) -> str:
    """The blocks that start with one of `sections`; raises SystemExit if one of them is missing."""
    blocks = text.split("\n\n")
    for section in sections:
        if not any(block.lstrip().startswith(section) for block in blocks):
            raise SystemExit(f"the output has no section '{section}'")
    kept = [block if block.lstrip().startswith(sections) else "..." for block in blocks]
    joined = "\n\n".join(kept)
    return re.sub(r"(?:\.\.\.\n\n)+\.\.\.", "...", joined)
