"""A grid of compiled steps beside the closed form: dense models and mixtures on all chips.

    python benchmarks/closed_form_grid.py FOLDER [NAME [PHASE]]

compiles the named step, or all, keeps the HLO in the folder, and stores the simulated times in
closed_form_grid.csv. Another call simulates the HLO that is there.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from meshscope.backends.compile.compile import compile_step_time
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.workload import Workload

CSV = Path(__file__).with_suffix(".csv")
OUTPUT = 128


@dataclass(frozen=True, kw_only=True)
class GridStep:
    """An experiment of the grid: the first `layers` layers of a model, unrolled, or None for all.

    All layers are timed by a shallow program.
    """

    name: str
    model: str
    topology: str
    plan: str
    batch: int
    prompt: int
    layers: int | None = None
    weight_dtype: str = "bf16"
    cache_dtype: str = "bf16"
    prefill_chunk: int | None = None

    @property
    def experiment(self) -> Experiment:
        """The experiment as it is predicted and compiled."""
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
                prefill_chunk=self.prefill_chunk,
            ),
            program=Program(loop=Loop.AUTO if self.layers is None else Loop.UNROLL),
            n_layers=self.layers,
        )


LLAMA, LLAMA_70B, QWEN = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-8B"
QWEN2, DEEPSEEK = "Qwen/Qwen2.5-7B", "deepseek-ai/DeepSeek-V3.1"
MIXTURE, GPT_OSS = "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"
STEPS = (
    GridStep(
        name="v5e1", model=LLAMA, topology="v5e:1x1", plan="tp=1", batch=2, prompt=1024, layers=2
    ),
    GridStep(
        name="v5p1", model=LLAMA, topology="v5p:1x1x1", plan="tp=1", batch=2, prompt=1024, layers=2
    ),
    GridStep(
        name="v7x", model=LLAMA, topology="tpu7x:1x1x1", plan="tp=2", batch=4, prompt=1024, layers=2
    ),
    GridStep(
        name="v6e4", model=QWEN, topology="v6e:2x2", plan="tp=4", batch=2, prompt=1024, layers=2
    ),
    GridStep(
        name="v4", model=LLAMA, topology="v4:2x2x1", plan="tp=4", batch=8, prompt=1024, layers=2
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
    GridStep(name="l8-v6e1-b1", model=LLAMA, topology="v6e:1x1", plan="tp=1", batch=1, prompt=1024),
    GridStep(name="l8-v5e4", model=LLAMA, topology="v5e:2x2", plan="tp=4", batch=8, prompt=1024),
    GridStep(name="l8-v5p1", model=LLAMA, topology="v5p:1x1x1", plan="tp=1", batch=8, prompt=1024),
    GridStep(
        name="l8-v7x-b32",
        model=LLAMA,
        topology="tpu7x:1x1x1",
        plan="tp=2",
        batch=32,
        prompt=1024,
        prefill_chunk=8192,
    ),
    GridStep(name="q8-v5p4", model=QWEN, topology="v5p:2x2x1", plan="tp=4", batch=8, prompt=1024),
    GridStep(
        name="q25-v7x1", model=QWEN2, topology="tpu7x:1x1x1", plan="dp=2", batch=16, prompt=1024
    ),
    GridStep(
        name="q3moe", model=MIXTURE, topology="v6e:2x2", plan="tp=4,ep=4", batch=4, prompt=1024
    ),
    GridStep(
        name="gptoss-ep",
        model=GPT_OSS,
        topology="v6e:2x4",
        plan="tp=8,ep=8",
        batch=64,
        prompt=1024,
        prefill_chunk=8192,
    ),
    GridStep(
        name="gptoss-tp",
        model=GPT_OSS,
        topology="v6e:2x4",
        plan="tp=8",
        batch=64,
        prompt=1024,
        prefill_chunk=8192,
    ),
    *(
        GridStep(
            name=name,
            model=DEEPSEEK,
            topology="v6e:8x8",
            plan=plan,
            batch=64,
            prompt=1024,
            weight_dtype="f8e4m3fn_block128",
            prefill_chunk=8192,
        )
        for name, plan in (
            ("ds-v6e64", "dp=8,tp=8,ep=64"),
            ("ds-v6e64-sp", "dp=8,tp=8,ep=64,sp"),
        )
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


def compile_steps(folder: Path, name: str = "", *phases: str) -> None:
    """Compiles the named step, or all, in both phases or the named ones, and stores the times."""
    for step in STEPS:
        if name in {"", step.name}:
            for phase in map(Phase, phases or Phase):
                at = folder / f"{step.name}-{phase}"
                at.mkdir(parents=True, exist_ok=True)
                _store(step, compile_step_time(step.experiment, phase, at, progress=_quiet))


def _quiet(*_: object) -> None:
    """Shows no progress."""


def _store(step: GridStep, time: StepTime) -> None:
    """Replaces the row of the step and phase."""
    key = [step.name, time.phase.value]
    with CSV.open() as file:
        head, *rows = csv.reader(file)
    rows = [row for row in rows if row[:2] != key]
    rows.append([*key, f"{time.step.value_s:.6g}", f"{time.exposed_s:.6g}"])
    order = [known.name for known in STEPS]
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(sorted(rows, key=lambda row: (order.index(row[0]), row[1] == "decode")))


if __name__ == "__main__":
    compile_steps(Path(sys.argv[1]), *sys.argv[2:])
