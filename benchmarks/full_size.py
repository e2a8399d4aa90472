"""Compiles the largest published models, all layers, and prints what that takes: seconds, memory, verdict.

Run: make full-size [NAMES="V3.1 Mixtral"]. Prints the rows of the table in docs/evidence/full-size.md; a row
whose model, slice or plan contains one of the names is compiled, all of them by default.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

POLL_S = 0.2
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Case(NamedTuple):
    """One experiment: prefill and decode of all layers."""

    model: str
    topology: str
    plan: str
    batch: int
    options: tuple[str, ...] = ()


EIGHT_BIT = ("--weight-dtype", "f8e4m3fn")
V31, V4 = "deepseek-ai/DeepSeek-V3.1-Base", "deepseek-ai/DeepSeek-V4-Flash-Base"
CASES = [
    Case(V31, "v6e:8x8", "dp=8,tp=8,ep=64", 64),
    Case(V31, "v6e:8x8", "dp=8,tp=8,ep=64", 64, EIGHT_BIT),
    Case(V31, "v5p:4x4x4", "dp=8,tp=8,ep=64", 64),
    Case(V31, "v5e:8x8", "dp=8,tp=8,ep=64", 64, ("--weight-dtype", "s8")),
    Case("deepseek-ai/DeepSeek-V3.2", "v5p:4x4x4", "dp=8,tp=8,ep=64", 64),
    Case(V4, "v6e:8x8", "dp=8,tp=8,ep=64", 64),
    Case("deepseek-ai/DeepSeek-V2-Lite", "v6e-8", "dp=2,tp=4,ep=8", 8),
    Case("Qwen/Qwen3-30B-A3B", "v6e-8", "dp=2,tp=4,ep=8", 8),
    Case("mistralai/Mixtral-8x7B-v0.1", "v5p:2x2x2", "dp=2,tp=4,ep=8", 8),
    Case("openai/gpt-oss-120b", "v5p:2x2x2", "dp=2,tp=4,ep=8", 8),
]


def memory_bytes(session: int) -> int:
    """Resident memory of all processes of a session, now; what they share is counted in each."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended since it was listed
            continue
        if int(fields[3]) == session:
            total += int(fields[21]) * PAGE_BYTES
    return total


def compiled(case: Case, out: Path) -> tuple[float, int, str]:
    """Wall seconds, peak resident bytes of all processes, and the verdict or the message."""
    command = [sys.executable, "-m", "meshscope", "compile", case.model, "--loop", "scan"]
    command += ["--dtype", "bf16", *case.options]
    command += ["--topology", case.topology, "--plan", case.plan, "--batch", str(case.batch)]
    command += ["--prompt", "1024", "--output", "128", "--out", str(out), "--json"]
    started, peak = time.perf_counter(), 0
    with (out.parent / "out.json").open("w+") as text, (out.parent / "log").open("w+") as log:
        child = subprocess.Popen(
            command,
            env={**os.environ, "MESHSCOPE_CACHE": str(out.parent / "programs")},
            stdout=text,
            stderr=log,
            start_new_session=True,
        )
        while child.poll() is None:
            peak = max(peak, memory_bytes(child.pid))
            time.sleep(POLL_S)
        seconds = time.perf_counter() - started
        text.seek(0)
        log.seek(0)
        if child.returncode:
            return seconds, peak, log.read().splitlines()[-1]
        document = json.load(text)
    needed = document["memory"]["total_bytes"] / 2**30
    return seconds, peak, f"{document['verdict']['verdict']}; {needed:.1f} GiB a device"


def main() -> None:
    """Compiles the cases one after the other and prints a row for each."""
    wanted = sys.argv[1:]
    print("| model | slice | plan | weights | seconds | memory | predicted and compiled |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        if wanted and not any(name in " ".join(map(str, case[:3])) for name in wanted):
            continue
        with tempfile.TemporaryDirectory() as directory:
            seconds, peak, verdict = compiled(case, Path(directory) / "run")
        cells = (
            case.model.split("/")[1],
            case.topology,
            case.plan,
            (case.options or ("", "bf16"))[1],
        )
        figures = (f"{seconds:.0f}", f"{peak / 1e9:.1f} GB", verdict)
        print("|", " | ".join((*cells, *figures)), "|", flush=True)


if __name__ == "__main__":
    main()
