"""Speed of the closed form in plans per second.

    python benchmarks/closed_form.py

`tools/fit_closed_form.py` compares it with published steps.
"""

import time
from collections.abc import Iterator

import numpy as np

from meshscope.cost.closed_form import PlanForm, closed_steps, plan_batch, plan_form
from meshscope.errors import MeshscopeError
from meshscope.events.enums import REQUEST_PHASES
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload

TARGET_PER_S = 10_000


def speed() -> None:
    """Prints plans per second, with and without the coefficients, relative to the target."""
    started = time.process_time()
    forms = _forms()
    coefficients_s = time.process_time() - started
    n = 20_000
    started = time.process_time()
    _evaluate(forms, n)
    evaluation_s = time.process_time() - started
    per_s, total_per_s = n / evaluation_s, n / (evaluation_s + coefficients_s)
    print(
        f"{len(forms) // 2} plans of Qwen/Qwen3-32B on v6e:16x16, coefficients: {coefficients_s:.2f} s"
    )
    print(f"{n} plans and workloads, prefill and decode: {evaluation_s:.2f} s on one core")
    print(f"{per_s:,.0f} per second, {per_s / TARGET_PER_S:.1f} x {TARGET_PER_S:,}")
    print(f"with coefficients {total_per_s:,.0f} per second, {total_per_s / TARGET_PER_S:.1f} x")


def _forms() -> list[PlanForm]:
    """The closed forms of all valid plans on 256 chips, both phases of each."""
    model, topology = read_model("Qwen/Qwen3-32B"), parse_topology("v6e:16x16")
    workload = Workload(batch=1024, prompt=1024, output=128)
    forms: list[PlanForm] = []
    for plan in _plans():
        try:
            experiment = experiment_of(
                model=model, plan=parse_plan(plan), topology=topology, workload=workload
            )
        except MeshscopeError:
            continue
        forms += [plan_form(experiment, phase) for phase in REQUEST_PHASES]
    return forms


def _plans() -> Iterator[str]:
    for tp in (1, 2, 4, 8, 16, 32, 64):
        for pp in (1, 2, 4):
            for data in ("dp", "fsdp"):
                for sp in ("", ",sp") if tp > 1 else ("",):
                    yield f"pp={pp},{data}={256 // (tp * pp)},tp={tp}{sp}"


def _evaluate(forms: list[PlanForm], n: int) -> None:
    """Evaluates `n` random plans and workloads in blocks."""
    rng = np.random.default_rng(1)
    at = rng.integers(0, len(forms) // 2, n)
    batch = 1024.0 * rng.integers(1, 5, n)
    prompt = 128.0 * rng.integers(1, 65, n)
    output = rng.integers(2, 1000, n).astype(float)
    plans = plan_batch(forms)
    for phase_at in (0, 1):
        for first in range(0, n, 2048):
            cut = slice(first, first + 2048)
            sizes = {"batch": batch[cut], "prompt": prompt[cut], "output": output[cut]}
            closed_steps(plans, 2 * at[cut] + phase_at, **sizes)


if __name__ == "__main__":
    speed()
