"""Start-up of the commands that need no accelerator, as a ratio to an empty Python process.

Run: make bench. Prints the minimum of several runs; the last line is one JSON document.
"""

import json
import subprocess
import sys
import time

N_RUNS = 7
PREDICT = ["predict", "Qwen/Qwen3-32B", "--topology", "v6e-8", "--plan", "tp=8"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "meshscope --help": [sys.executable, "-m", "meshscope", "--help"],
    "meshscope predict --help": [sys.executable, "-m", "meshscope", "predict", "--help"],
    "meshscope predict": [sys.executable, "-m", "meshscope", *PREDICT],
    "meshscope predict, 1,024 chips": [
        *[sys.executable, "-m", "meshscope", "predict", "Qwen/Qwen3-32B"],
        *["--topology", "v5p:8x8x16", "--plan", "fsdp=128,tp=8", "--batch", "128"],
    ],
}


def fastest_s(command: list[str]) -> float:
    """Wall seconds of the fastest of several runs of the whole process."""
    times: list[float] = []
    for _ in range(N_RUNS):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    """Prints seconds and ratios."""
    seconds = {name: fastest_s(command) for name, command in COMMANDS.items()}
    base_s = seconds["python -c pass"]
    for name, value in seconds.items():
        print(f"{name:32} {value:6.3f} s  {value / base_s:5.1f} x an empty process")
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
