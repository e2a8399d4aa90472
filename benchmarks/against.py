"""Speed of the commands against another revision: `python benchmarks/against.py REVISION`.

Checks the revision out beside this tree, runs each command alternately from both, and prints the ratio of
the fastest runs. A ratio below 1 means that this tree is faster. Needs the environment of `make setup`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
N_RUNS = 7
N_COMPILES = 2
LLAMA = "meta-llama/Llama-3.1-8B --topology v6e-8 --plan tp=8 --batch 8 --prompt 1024"
QWEN = "Qwen/Qwen3-32B --topology v5p:8x8x16 --plan fsdp=128,tp=8 --batch 128"
COMMANDS = {
    "--help": N_RUNS,
    f"predict {LLAMA}": N_RUNS,
    f"predict {QWEN}": N_RUNS,
    f"compile {LLAMA} --layers 4 --out run --force": N_COMPILES,
    "show run": N_RUNS,
    "show run --json": N_RUNS,
    "compare run": N_RUNS,
}


def seconds(tree: Path, command: str, folder: Path) -> float:
    """Wall seconds of one run of the command with the package of `tree`."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "meshscope", *command.split()],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def compare(other: Path) -> dict[str, dict[str, float]]:
    """The fastest run of each command from both trees, and their ratio."""
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
        sides = ((ROOT, Path(ours)), (other, Path(theirs)))
        for command, n_runs in COMMANDS.items():
            times = [[seconds(*side_of(side, command)) for side in sides] for _ in range(n_runs)]
            this_s, other_s = (min(column) for column in zip(*times, strict=True))
            results[command] = {"this_s": this_s, "other_s": other_s, "ratio": this_s / other_s}
            print(
                f"{this_s:8.3f} s {other_s:8.3f} s {this_s / other_s:6.2f}  {command}", flush=True
            )
    return results


def side_of(side: tuple[Path, Path], command: str) -> tuple[Path, str, Path]:
    """The arguments of `seconds` for one side."""
    tree, folder = side
    return tree, command, folder


def main(revision: str) -> None:
    """Prints seconds and ratios; the last line is one JSON document."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), revision], check=True)
        try:
            print("    this     other  ratio  command")
            results = compare(tree)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
