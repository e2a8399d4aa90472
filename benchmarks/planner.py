"""Seconds of whole searches, and plan-workload pairs per second once coefficients are known.

    python benchmarks/planner.py [--pods]

`--pods` adds whole pods, which take minutes.
"""

import sys
import time
from dataclasses import dataclass, replace

import numpy as np

from meshscope.cost.closed_form import closed_steps, plan_batch, plan_form
from meshscope.events.enums import REQUEST_PHASES
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment
from meshscope.plans.workload import Workload
from meshscope.serving.objective import Objective
from meshscope.serving.search import search
from meshscope.serving.space import Batches, SearchSpace, plan_space

PAIRS_PER_S = 100_000
WORKLOAD = Workload(batch=1, prompt=1024, output=128)


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search with the seconds it may take; None without a target."""

    model: str
    topology: str
    target_s: float | None = None


SEARCHES = (
    Search(model="Qwen/Qwen3-32B", topology="v6e-8", target_s=2.0),
    Search(model="deepseek-ai/DeepSeek-V3.1-Base", topology="v6e:16x16", target_s=10.0),
)
PODS = (
    Search(model="Qwen/Qwen3-32B", topology="v5p:16x20x28"),
    Search(model="Qwen/Qwen3-32B", topology="tpu7x:16x24x24"),
    Search(model="Qwen/Qwen3-32B", topology="4xv6e:16x16"),
)


def timed(of: Search) -> None:
    """Prints the seconds of a search and of its CPU, and the ratio to its target."""
    space = SearchSpace(
        model=read_model(of.model),
        topology=parse_topology(of.topology),
        workload=WORKLOAD,
        batches=Batches(),
        weight_dtypes=("bf16", "s8"),
        cache_dtypes=("bf16", "s8"),
    )
    started, cpu_started = time.perf_counter(), time.process_time()
    result = search(space, Objective())
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    target = "" if of.target_s is None else f", {cpu_s / of.target_s:.2f} x {of.target_s:g} s"
    print(
        f"{of.model} on {of.topology}: {result.n_plans:,} plans, {result.n_candidates:,} candidates, "
        f"{seconds:.1f} s, {cpu_s:.1f} s of CPU{target}"
    )


def pairs() -> None:
    """Prints evaluated plan-workload pairs per second, prefill and decode."""
    model, topology = read_model("Qwen/Qwen3-32B"), parse_topology("v6e-8")
    plans = plan_space(model, topology.n_devices, prompt=WORKLOAD.prompt).plans
    experiments = [
        Experiment(
            model=model,
            plan=plan,
            topology=topology,
            workload=replace(WORKLOAD, batch=plan.data_size),
        )
        for plan in plans
    ]
    forms = [plan_form(one, phase) for one in experiments for phase in REQUEST_PHASES]
    rng, n = np.random.default_rng(1), 50_000
    at = rng.integers(0, len(plans), n)
    batch = 8.0 * rng.integers(1, 65, n)
    batched = plan_batch(forms)
    started = time.process_time()
    for first in range(0, n, 2048):
        cut = slice(first, first + 2048)
        lengths = {name: np.full(len(at[cut]), size) for name, size in LENGTHS.items()}
        for phase_at in (0, 1):
            closed_steps(batched, 2 * at[cut] + phase_at, batch=batch[cut], **lengths)
    per_s = n / (time.process_time() - started)
    print(f"{per_s:,.0f} plan-workload pairs per second of CPU, {per_s / PAIRS_PER_S:.2f} x target")


LENGTHS = {"prompt": float(WORKLOAD.prompt), "output": float(WORKLOAD.output)}


if __name__ == "__main__":
    pairs()
    for one in (*SEARCHES, *(PODS if "--pods" in sys.argv else ())):
        timed(one)
