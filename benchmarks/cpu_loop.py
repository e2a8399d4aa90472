"""Calibrates virtual CPU devices, predicts and measures collectives on them, and prints the errors.

Run: make cpu-loop. Each of twenty experiments runs the collectives of one step, as `predict` lists them,
one after the other on cpu:8. The prediction uses a profile that `meshscope calibrate` measures just before.
Compute is left out, because eight devices would queue for the cores of the machine. Writes
benchmarks/cpu_loop.csv.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from meshscope.cost.collectives import predict
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Phase
from meshscope.hardware.interconnect.constants import LinkConstants
from meshscope.hardware.interconnect.lines import collective_time
from meshscope.hardware.interconnect.profile import load_profile
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload

CSV = Path(__file__).with_suffix(".csv")
DENSE, EXPERTS = "meta-llama/Llama-3.2-3B", "Qwen/Qwen3-30B-A3B"
TOPOLOGY = parse_topology("cpu:8")
N_LAYERS = 2
CALIBRATED = ("tp=8", "dp=2,tp=4")  # covers every group size of the cases
MAX_BYTES, REPEATS = 1 << 22, 15


class Case(NamedTuple):
    """One experiment: a step of a phase under a plan."""

    model: str
    plan: str
    batch: int
    prompt: int
    phase: Phase

    @property
    def experiment(self) -> Experiment:
        """The experiment in float32: XLA sends no 16-bit numbers between CPU devices."""
        return experiment_of(
            model=read_model(self.model),
            plan=parse_plan(self.plan),
            topology=TOPOLOGY,
            workload=Workload(
                batch=self.batch,
                prompt=self.prompt,
                output=2,
                weight_dtype="f32",
                activation_dtype="f32",
                cache_dtype="f32",
            ),
            n_layers=N_LAYERS,
        )

    @property
    def rows(self) -> list[Collective]:
        """The collectives of one device in one step."""
        return [row for row in predict(self.experiment) if row.phase is self.phase]


def cases() -> list[Case]:
    """Ten plans, each in prefill and decode."""
    plans = [
        (DENSE, "tp=8", 2, 32),
        (DENSE, "tp=8,sp", 8, 32),
        (DENSE, "dp=2,tp=4", 8, 16),
        (DENSE, "dp=2,tp=4,sp", 8, 32),
        (DENSE, "dp=4,tp=2", 8, 32),
        (DENSE, "cp=2,tp=4", 2, 64),
        (EXPERTS, "tp=8,ep=8", 4, 32),
        (EXPERTS, "tp=4,dp=2", 8, 32),
        (EXPERTS, "dp=8,ep=8", 8, 4),
        (EXPERTS, "tp=2,dp=4", 8, 8),
    ]
    return [Case(*plan, phase) for plan in plans for phase in REQUEST_PHASES]


Step = tuple[str, str, int, int]  # kind, axis, payload bytes, count


def steps_of(case: Case) -> list[Step]:
    """The collectives of a step, equal ones merged."""
    counted: Counter[tuple[str, str, int]] = Counter()
    for row in case.rows:
        assert row.payload_bytes is not None
        counted[(row.kind, row.axis or "", row.payload_bytes)] += row.count
    return [(*key, count) for key, count in counted.items()]


def predicted(case: Case, constants: LinkConstants) -> tuple[float, float | None, float | None]:
    """Seconds in sequence with both bounds, for fully correlated errors."""
    times = [
        (
            row.count,
            collective_time(
                row.kind,
                groups=row.groups,
                payload_bytes=row.payload_bytes or 0,
                topology=TOPOLOGY,
                constants=constants,
            ),
        )
        for row in case.rows
    ]
    lows = [count * time.low_s for count, time in times if time.low_s is not None]
    highs = [count * time.high_s for count, time in times if time.high_s is not None]
    is_known = len(lows) == len(times)
    return (
        sum(count * time.seconds for count, time in times),
        sum(lows) if is_known else None,
        sum(highs) if is_known else None,
    )


def calibrated(folder: Path) -> LinkConstants:
    """The constants of calibrations over every group size."""
    merged: LinkConstants | None = None
    for plan in CALIBRATED:
        path = folder / f"{plan}.json"
        command = [sys.executable, "-m", "meshscope", "calibrate", "--topology", "cpu:8"]
        command += ["--plan", plan, "--max-bytes", str(MAX_BYTES), "--repeats", str(REPEATS)]
        subprocess.run(
            [*command, "--out", str(path), "--json"], check=True, stdout=subprocess.DEVNULL
        )
        constants = load_profile(path).constants
        merged = constants if merged is None else merge(merged, constants)
    assert merged is not None
    return merged


def merge(first: LinkConstants, second: LinkConstants) -> LinkConstants:
    """The constants of both, the first one's for shared group sizes and as reference of efficiencies."""
    from dataclasses import replace  # noqa: PLC0415

    assert first.memory_bytes_per_s is not None
    assert second.memory_bytes_per_s is not None
    scale = second.memory_bytes_per_s / first.memory_bytes_per_s
    known = {(entry.kind, entry.group_size) for entry in first.by_kind}
    added = [
        replace(entry, rates=replace(entry.rates, efficiency=entry.rates.efficiency * scale))
        for entry in second.by_kind
        if (entry.kind, entry.group_size) not in known
    ]
    return replace(
        first, by_kind=(*first.by_kind, *added), measured=(*first.measured, *second.measured)
    )


def measured_in_child(requests: list[list[Step]], plans: list[str]) -> list[float]:
    """Least seconds of each experiment's collectives, measured in a process with eight CPU devices."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, __file__, "child"],
        input=json.dumps({"requests": requests, "plans": plans}),
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def child() -> None:
    """Times every experiment by the difference between few and many repetitions."""
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    job = json.loads(sys.stdin.read())
    seconds: list[float] = []
    for steps, plan in zip(job["requests"], job["plans"], strict=True):
        mesh_axes = parse_plan(plan).mesh
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(mesh_axes.sizes), mesh_axes.names)
        seconds.append(step_s(mesh, steps))
    print(json.dumps(seconds))


def step_s(mesh: Any, steps: list[Step]) -> float:
    """Seconds of all collectives of a step in sequence."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    from jax import lax  # noqa: PLC0415
    from jax.sharding import PartitionSpec as P  # noqa: PLC0415

    from meshscope.backends.calibrate.measure import collective_body, repeated_s  # noqa: PLC0415
    from meshscope.events.enums import Kind  # noqa: PLC0415

    sizes = []
    for kind, axis, payload_bytes, _ in steps:
        n = mesh.shape[axis]
        local_bytes = payload_bytes // n if kind == "all_gather" else payload_bytes
        sizes.append(max(1, local_bytes // 4))
    every = P(mesh.axis_names)

    def step(arrays: Any) -> Any:
        arrays = list(arrays)
        for index, (kind, axis, _, count) in enumerate(steps):
            body = collective_body(Kind(kind), axis, mesh.shape[axis])
            for _ in range(count):
                arrays[index] = body(arrays[index])
                arrays = list(lax.optimization_barrier(tuple(arrays)))
        return tuple(arrays)

    def repeated(arrays: Any, count: Any) -> Any:
        return lax.fori_loop(0, count, lambda _, arrays: step(arrays), arrays)

    program = jax.jit(
        jax.shard_map(repeated, mesh=mesh, in_specs=(every, P()), out_specs=every, check_vma=False)
    )
    start = tuple(jnp.zeros(size * mesh.size, jnp.float32) for size in sizes)
    return min(repeated_s(program, start, repeats=REPEATS))


def main() -> None:
    """Calibrates, predicts, measures, writes the CSV file and prints the errors."""
    every = cases()
    with tempfile.TemporaryDirectory() as folder:
        constants = calibrated(Path(folder))
    measured = measured_in_child([steps_of(case) for case in every], [case.plan for case in every])
    errors: list[float] = []
    n_inside = 0
    with CSV.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "model",
                "plan",
                "phase",
                "n_collectives",
                "predicted_s",
                "low_s",
                "high_s",
                "measured_s",
            ]
        )
        for case, measured_s in zip(every, measured, strict=True):
            ours_s, low_s, high_s = predicted(case, constants)
            n = sum(row.count for row in case.rows)
            errors.append(ours_s / measured_s - 1)
            n_inside += low_s is not None and high_s is not None and low_s <= measured_s <= high_s
            cells = [case.model, case.plan, case.phase, n]
            writer.writerow([*cells, ours_s, low_s, high_s, measured_s])
            print(
                f"{case.model:24} {case.plan:14} {case.phase:8} {n:3} collectives: predicted "
                f"{ours_s * 1e3:7.2f} ms, measured {measured_s * 1e3:7.2f} ms, {errors[-1]:+.0%}"
            )
    median = statistics.median(map(abs, errors))
    worst = max(errors, key=abs)
    print(
        f"median error {median:.0%}, worst {worst:+.0%}; {n_inside} of {len(every)} inside the interval"
    )
    print(json.dumps({"median_error": median, "worst_error": worst, "n_inside": n_inside}))


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        child()
    else:
        main()
