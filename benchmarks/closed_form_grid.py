"""The grid of experiments that compares the closed form with compiled programs.

    python benchmarks/closed_form_grid.py CACHE [N]

compiles the experiments that are missing in the folder CACHE, all or the first N. It can be interrupted and
resumed. A child process compiles one after the other; a crash marks and skips its experiment.
"""

import json
import random
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

from meshscope.backends.compile.worker import compile_phase, set_environment
from meshscope.errors import MeshscopeError
from meshscope.spec.experiment import Experiment, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.program import Loop, Program
from meshscope.spec.workload import Workload

N_EXPERIMENTS = 200
SEED = 7

DENSE = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.3-70B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-32B",
)
EXPERTS = ("Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1")
SLICES: dict[str, tuple[str, ...]] = {
    "v6e:2x4": ("tp=8", "dp=2,tp=4", "fsdp=2,tp=4", "fsdp=8", "tp=8,sp", "dp=4,tp=2", "dp=8"),
    "v5e:2x4": ("tp=8", "dp=2,tp=4", "fsdp=8", "tp=8,sp"),
    "v5p:2x2x1": ("tp=4", "dp=2,tp=2", "fsdp=4", "tp=4,sp"),
    "v4:2x2x1": ("tp=8", "dp=2,tp=4", "tp=8,sp"),
    "tpu7x:2x2x1": ("tp=8", "dp=2,tp=4", "tp=8,sp", "fsdp=2,tp=4"),
    "v6e:2x2": ("tp=4", "dp=2,tp=2", "tp=4,sp", "fsdp=4"),
    "v6e:1x1": ("tp=1",),
    "v6e:4x4": ("dp=2,tp=8", "fsdp=2,tp=8", "fsdp=16"),
}
EXPERT_PLANS = ("tp=8", "dp=8,ep=8", "dp=2,tp=4,ep=8", "tp=8,ep=8")
WORKLOADS = ((1, 1024), (8, 1024), (16, 512), (8, 2048), (32, 256), (64, 128), (16, 1024))
OUTPUT = 128
LAYERS = 4


def experiments() -> list[tuple[str, Experiment]]:
    """The experiments with their names, in random order, so that any first N are a sample."""
    candidates = [
        (model, topology, plan, workload)
        for model, (topology, plans), workload in product(DENSE, SLICES.items(), WORKLOADS)
        for plan in plans
    ]
    candidates += [
        (model, topology, plan, workload)
        for model, topology, plan, workload in product(
            EXPERTS, ("v6e:2x4", "v5e:2x4"), EXPERT_PLANS, WORKLOADS[:3]
        )
    ]
    random.Random(SEED).shuffle(candidates)
    grid: list[tuple[str, Experiment]] = []
    for model, topology, plan, workload in candidates:
        if len(grid) < N_EXPERIMENTS and (
            experiment := _experiment(model, topology, plan, workload)
        ):
            grid.append((_name(model, topology, plan, workload), experiment))
    return grid


def _name(model: str, topology: str, plan: str, workload: tuple[int, int]) -> str:
    words = (model.rsplit("/", 1)[-1], topology, plan, f"b{workload[0]}", f"p{workload[1]}")
    return "_".join(words).replace(":", "-").replace("=", "").replace(",", "-")


def _experiment(
    model: str, topology: str, plan: str, workload: tuple[int, int]
) -> Experiment | None:
    """The experiment; None if the plan does not divide the model."""
    batch, prompt = workload
    try:
        return experiment_of(
            model=read_model(model),
            plan=parse_plan(plan),
            topology=parse_topology(topology),
            workload=Workload(batch=batch, prompt=prompt, output=OUTPUT),
            program=Program(loop=Loop.SCAN),
            n_layers=LAYERS,
        )
    except MeshscopeError:
        return None


def compile_grid(cache: Path, limit: int) -> None:
    """Compiles missing experiments in a child process; a crash skips its experiment."""
    while any(not (cache / name / "done").exists() for name, _ in experiments()[:limit]):
        child = subprocess.run(
            [sys.executable, __file__, str(cache), str(limit), "--child"], check=False
        )
        if child.returncode == 0:
            return
        for name, _ in experiments()[:limit]:
            if (cache / name).exists() and not (cache / name / "done").exists():
                (cache / name / "done").write_text(f"crashed with {child.returncode}")


def _compile_here(cache: Path, limit: int) -> None:
    set_environment()
    for name, experiment in experiments()[:limit]:
        folder = cache / name
        if (folder / "done").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        (folder / "experiment.json").write_text(json.dumps(experiment.as_dict()))
        outcome = "compiled"
        try:
            for phase in experiment.phases:
                compile_phase(experiment, phase, folder)
        except Exception as error:  # noqa: BLE001  one experiment must not end the grid
            outcome = f"refused: {str(error)[:200]}"
        (folder / "done").write_text(outcome)
        print(f"{name}: {outcome}, {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    """Compiles missing experiments, with --child in this process."""
    cache = Path(sys.argv[1])
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else N_EXPERIMENTS
    if "--child" in sys.argv:
        _compile_here(cache, limit)
    else:
        compile_grid(cache, limit)


if __name__ == "__main__":
    main()
