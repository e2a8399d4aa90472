"""Prints a command and its real output as a Markdown block; the README and the pages use it with cog."""

import os
import re
import shlex
import subprocess
import sys

WIDTH = "100"


def shown(command: str, *, shows: str | None = None) -> None:
    """Runs `command` and prints it with what it writes to standard output.

    `shows` is the command line to print in its place, where the real one needs more options.
    """
    environment = os.environ | {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    done = subprocess.run(
        shlex.split(command), capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"'{command}' exited with {done.returncode}")
    text = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
    text = re.sub(r"python (\d+\.\d+)\.\d+", r"python \1", text)  # patch releases print the same
    sys.stdout.write(f"```console\n$ {shows or command}\n{text}\n```\n")
