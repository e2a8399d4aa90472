"""What `meshscope compile` costs beyond lowering and compiling the same programs with bare JAX.

Run: make bench. Both sides start fresh processes, phases side by side, on the same machine in one
run, alternating; the ratio of the medians should stay at or below 1.10. The last line is JSON.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

N_PAIRS = 3
MODEL, TOPOLOGY, PLAN = "meta-llama/Llama-3.1-8B", "v6e-8", "tp=8"
N_LAYERS = 8  # few layers make what is fixed weigh more

# Lowers and compiles one phase and keeps the text; nothing of it is read.
BARE = f"""
import sys
from meshscope.backends.compile.worker import set_environment, slice_devices
set_environment()
from meshscope.model.config import read_model
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment import experiment_of
from meshscope.plans.program import Loop, Program
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload
from meshscope.programs.jax.build import build_program
from meshscope.events.enums import Phase
experiment = experiment_of(
    model=read_model({MODEL!r}), plan=parse_plan({PLAN!r}), topology=parse_topology({TOPOLOGY!r}),
    workload=Workload(batch=8, prompt=1024), program=Program(loop=Loop.UNROLL),
    n_layers={N_LAYERS},
)
build_program(experiment, Phase(sys.argv[1]), slice_devices(experiment.topology)).lower().compile()
"""


def bare_s() -> float:
    """Wall seconds of the bare lowering and compiling of both phases, side by side."""
    started = time.perf_counter()
    phases = ("prefill", "decode")
    children = [
        subprocess.Popen([sys.executable, "-c", BARE, phase], stderr=subprocess.DEVNULL)
        for phase in phases
    ]
    if any(child.wait() for child in children):
        raise SystemExit("the bare compilation failed")
    return time.perf_counter() - started


def meshscope_s(out: Path) -> float:
    """Wall seconds of the whole command, table and run folder included."""
    command = [sys.executable, "-m", "meshscope", "compile", MODEL, "--topology", TOPOLOGY]
    command += ["--plan", PLAN, "--batch", "8", "--prompt", "1024", "--loop", "unroll"]
    command += ["--layers", str(N_LAYERS)]
    started = time.perf_counter()
    subprocess.run(
        [*command, "--out", str(out)],
        check=True,
        env={**os.environ, "MESHSCOPE_CACHE": str(out.with_name(f"{out.name}_programs"))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def main() -> None:
    """Alternates the two and prints the ratio of the medians."""
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(N_PAIRS):
            pairs.append((bare_s(), meshscope_s(Path(scratch) / str(index))))
            print(f"bare {pairs[-1][0]:.1f} s, meshscope compile {pairs[-1][1]:.1f} s")
    bare, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"{MODEL}, {N_LAYERS} layers, {TOPOLOGY}, {PLAN}: {ours / bare:.3f} x the bare compilation"
    )
    print(json.dumps({"bare_s": bare, "meshscope_s": ours, "ratio": ours / bare}))


if __name__ == "__main__":
    main()
