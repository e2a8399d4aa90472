"""A small grid of compiled steps beside the closed form: unrolled layers of dense models and mixtures.

    python benchmarks/closed_form_grid.py CACHE

compiles the runs that are missing in the folder CACHE and rewrites closed_form_grid.csv, which holds the
simulated times of the compiled schedules. It can be interrupted and resumed.
"""

import csv
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import meshscope
from meshscope.errors import MeshscopeError
from meshscope.events.enums import Phase, Source
from meshscope.spec.experiment import Experiment, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.workload import Workload
from meshscope.store.read import read_run

CSV = Path(__file__).with_suffix(".csv")
OUTPUT = 128


@dataclass(frozen=True, kw_only=True)
class GridStep:
    """An experiment of the grid: the first `layers` layers of a model."""

    name: str
    model: str
    topology: str
    plan: str
    batch: int
    prompt: int
    layers: int = 2
    weight_dtype: str = "bf16"
    cache_dtype: str = "bf16"

    @property
    def experiment(self) -> Experiment:
        """The experiment as the closed form takes it."""
        return experiment_of(
            model=read_model(self.model),
            plan=parse_plan(self.plan),
            topology=parse_topology(self.topology),
            workload=Workload(
                batch=self.batch,
                prompt=self.prompt,
                output=OUTPUT,
                weight_dtype=self.weight_dtype,
                cache_dtype=self.cache_dtype,
            ),
            n_layers=self.layers,
        )


LLAMA, LLAMA_70B, QWEN = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-8B"
MIXTURE, GPT_OSS = "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"
STEPS = (
    GridStep(name="v5e1", model=LLAMA, topology="v5e:1x1", plan="tp=1", batch=2, prompt=1024),
    GridStep(name="v5p1", model=LLAMA, topology="v5p:1x1x1", plan="tp=1", batch=2, prompt=1024),
    GridStep(name="v7x", model=LLAMA, topology="tpu7x:1x1x1", plan="tp=2", batch=4, prompt=1024),
    GridStep(name="v6e4", model=QWEN, topology="v6e:2x2", plan="tp=4", batch=2, prompt=1024),
    GridStep(name="v4", model=LLAMA, topology="v4:2x2x1", plan="tp=4", batch=8, prompt=1024),
    GridStep(
        name="q3moe", model=MIXTURE, topology="v6e:2x2", plan="tp=4,ep=4", batch=4, prompt=1024
    ),
    GridStep(
        name="gptoss", model=GPT_OSS, topology="v6e:2x4", plan="tp=8,ep=8", batch=64, prompt=1024
    ),
    GridStep(
        name="v5e16",
        model=LLAMA_70B,
        topology="v5e:4x4",
        plan="tp=16",
        batch=32,
        prompt=1024,
        layers=3,
        weight_dtype="s8",
        cache_dtype="s8",
    ),
)


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """One phase of a step of the grid, with the simulated time of its schedule."""

    step: GridStep
    phase: Phase
    compiled_s: float
    exposed_s: float


def compiled_steps() -> tuple[CompiledStep, ...]:
    """The rows of the table."""
    by_name = {step.name: step for step in STEPS}
    with CSV.open() as file:
        return tuple(
            CompiledStep(
                step=by_name[row["name"]],
                phase=Phase(row["phase"]),
                compiled_s=float(row["compiled_s"]),
                exposed_s=float(row["exposed_s"]),
            )
            for row in csv.DictReader(file)
        )


def compile_missing(cache: Path) -> None:
    """Compiles the steps without a run; a refused one is reported and skipped."""
    for step in STEPS:
        if (cache / step.name).exists():
            continue
        values = {name: value for name, value in asdict(step).items() if name != "name"}
        try:
            meshscope.compile(**values, output=OUTPUT, loop="unroll", out=cache / step.name)
        except MeshscopeError as error:
            print(f"{step.name}: {error}", file=sys.stderr)


def write_times(cache: Path) -> None:
    """One row per compiled phase: the step, and its simulated time."""
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["name", "phase", "compiled_s", "exposed_s"])
        for step in STEPS:
            if not (cache / step.name).exists():
                continue
            for time in read_run(cache / step.name).times:
                if time.source is Source.COMPILED:
                    figures = [f"{s:.6g}" for s in (time.step.value_s, time.exposed_s)]
                    writer.writerow([step.name, time.phase.value, *figures])


def main() -> None:
    """Compiles what is missing and rewrites the table."""
    cache = Path(sys.argv[1])
    compile_missing(cache)
    write_times(cache)


if __name__ == "__main__":
    main()
