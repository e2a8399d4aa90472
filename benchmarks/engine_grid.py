"""Steps of serving engines, compiled with their own code, beside the closed form, as tables for docs/evidence.

    python benchmarks/engine_grid.py [WORD...]

compiles the steps that engine_grid.csv lacks and whose line contains all words, and appends their times. The first
eight layers are compiled, and four of them stand for the others, as in `compile`. Steps that differ only in the
length of their contexts share a program, whose attention then reads more. A step that the engine refuses has its
message and no time. `python benchmarks/engine_grid.py golden` adds the programs of tests/golden/engines
and tests/published.
"""

import csv
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from meshscope.backends.compile.compile import compile_experiment
from meshscope.backends.compile.import_hlo import read_imported
from meshscope.backends.compile.read import read_chunks
from meshscope.cost.closed_form import plan_form
from meshscope.cost.features import served_blocks
from meshscope.cost.paged import VLLM
from meshscope.cost.predicted import evaluated
from meshscope.errors import MeshscopeError
from meshscope.events.enums import Phase, Source
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.model.layers import Fold, ShallowLayers
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Frontend, Program
from meshscope.plans.workload import Workload
from meshscope.readers.hlo.parse import read_hlo
from meshscope.units import format_seconds

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "golden" / "engines"))

import engine_steps as golden
from published_steps import Half, PublishedStep, published_steps

CSV = Path(__file__).with_suffix(".csv")
PROGRAMS = Path(__file__).parents[1] / "tests" / "published"
N_COMPILED, N_FOLDED, FIRST_FOLDED = 8, 4, 2  # layers
FAR = 0.1  # from the engine's program, which the page names
CHUNK = 2048
PLANS = {
    "Qwen/Qwen3-8B": ("tp=1", "tp=2", "tp=4"),
    "Qwen/Qwen3-32B": ("tp=2", "tp=4", "tp=8"),
    "Qwen/Qwen3-30B-A3B": ("tp=4,ep=4",),
    "meta-llama/Llama-3.1-8B": ("tp=1", "tp=8"),
    "meta-llama/Llama-3.1-70B": ("tp=8",),
}
SLICES = {
    "tpu7x": {2: "tpu7x:1x1x1", 4: "tpu7x:2x1x1", 8: "tpu7x:2x2x1"},
    "v6e": {1: "v6e:1x1", 4: "v6e:2x2", 8: "v6e:2x4"},
    "v5e": {1: "v5e:1x1", 8: "v5e:2x4"},
    "v5p": {1: "v5p:1x1x1", 4: "v5p:2x2x1"},
}
NEWEST = {Frontend.VLLM_TPU: "0.32.0", Frontend.SGLANG_JAX: "main"}


@dataclass(frozen=True, kw_only=True)
class EngineStep:
    """A step of an engine; the fields are columns of the table."""

    engine: str  # or the authors of a bare loop
    version: str
    model: str
    topology: str
    plan: str
    weight_dtype: str
    phase: str
    batch: int
    prompt: int
    output: int
    chunk: int
    layers: int = 0  # only the first ones of the model; 0: all

    def experiment(self, n_layers: int | None = None) -> Experiment:
        """The experiment of the engine's program, of all layers or the first ones."""
        program = Program(frontend=Frontend(self.engine), engine_version=self.version)
        return self._experiment(program, n_layers)

    @property
    def program(self) -> "EngineStep":
        """What its program depends on: chunks of prompts, or sequences, not how much of the cache is filled."""
        batch = 0 if self.phase == Phase.PREFILL else self.batch
        return replace(self, batch=batch, prompt=0, output=0)

    def _experiment(self, program: Program, n_layers: int | None = None) -> Experiment:
        return experiment_of(
            model=read_model(self.model),
            plan=parse_plan(self.plan),
            topology=parse_topology(self.topology),
            workload=Workload(
                batch=self.batch,
                prompt=self.prompt,
                output=self.output,
                weight_dtype=self.weight_dtype,
                prefill_chunk=self.chunk,
            ),
            program=program,
            n_layers=n_layers or self.layers or None,
        )

    def predicted_s(self) -> float:
        """Seconds of the closed form, with the engine's attention."""
        experiment, phase = self._experiment(Program()), Phase(self.phase)
        is_sglang = self.engine == Frontend.SGLANG_JAX
        version = "sglang-v3" if is_sglang else VLLM
        form = plan_form(experiment, phase, attention=served_blocks(experiment, version))
        return evaluated(form, experiment.workload)[1].value_s


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The simulated time of a step's schedule, or why there is none."""

    step: EngineStep
    compiled_s: float | None = None
    exposed_s: float | None = None
    refusal: str = ""


FIELDS = [field.name for field in fields(EngineStep)]


# By the first word of a source: the engine that was measured, and the version whose program there is.
MEASURED = {
    "sglang-jax": (Frontend.SGLANG_JAX, "main"),
    "cornell-sysphotonics/ccl-bench@1d257f0,": (Frontend.VLLM_TPU, "0.12.0"),
    "jax-ml/jax-llm-examples@8b4b246": ("jax-llm-examples", "8b4b246"),
}


def of_published(published: PublishedStep) -> EngineStep | None:
    """The step in the engine that was measured; None for software that was replaced, and kernels that no engine compiles."""
    experiment = published.experiment
    is_fused = experiment.program.dispatch is DispatchForm.FUSED
    if is_fused or published.half is Half.OLD:
        return None
    engine, version = MEASURED[published.source.partition(" ")[0]]
    return _step_of(
        experiment,
        engine=engine,
        version=version,
        model=experiment.model.name,
        phase=published.phase,
    )


def _step_of(experiment: Experiment | ExperimentRecord, **named: Any) -> EngineStep:
    """The step of an experiment; `named` are the fields that it does not have."""
    workload = experiment.workload
    return EngineStep(
        topology=experiment.topology.name,
        plan=str(experiment.plan),
        weight_dtype=workload.weight_dtype,
        batch=workload.batch,
        prompt=workload.prompt,
        output=workload.output,
        chunk=workload.prefill_chunk or CHUNK,
        **named,
    )


def _grid() -> Iterator[EngineStep]:
    """Phases and batches x chips x families x engines x dtypes x plans x contexts."""
    sizes = (
        (Phase.DECODE, 8),
        (Phase.PREFILL, 1),
        (Phase.DECODE, 64),
        (Phase.DECODE, 1),
        (Phase.DECODE, 256),
    )
    for (phase, batch), chip, model, engine, dtype in product(
        sizes, SLICES, PLANS, NEWEST, ("bf16", "f8e4m3fn")
    ):
        if dtype != "bf16" and (engine is Frontend.SGLANG_JAX or chip in {"v5e", "v5p"}):
            continue  # the engine compiles bf16 alone; no units of fp8
        if "A3B" in model and engine is Frontend.VLLM_TPU:
            continue  # no JAX code in the engine
        plans = [plan for plan in PLANS[model] if parse_plan(plan).n_devices in SLICES[chip]]
        for plan, prompt in product(
            plans, (1024, 8192, 32768) if phase is Phase.DECODE else (2048, 8192)
        ):
            yield EngineStep(
                engine=engine,
                version=NEWEST[engine],
                model=model,
                topology=SLICES[chip][parse_plan(plan).n_devices],
                plan=plan,
                weight_dtype=dtype,
                phase=phase,
                batch=batch,
                prompt=prompt,
                output=128,
                chunk=CHUNK,
            )


def steps() -> list[EngineStep]:
    """Every step to compile: published ones first."""
    published = [of_published(step) for step in published_steps()]
    compiled = [step for step in published if step is not None and step.engine in NEWEST]
    return list(dict.fromkeys([*compiled, *_grid()]))


@cache
def compiled_steps() -> dict[EngineStep, CompiledStep]:
    """The rows of the table."""
    if not CSV.exists():
        return {}
    with CSV.open() as file:
        rows = list(csv.DictReader(file))
    compiled = [_read(row) for row in rows]
    return {one.step: one for one in compiled}


def _read(row: dict[str, str]) -> CompiledStep:
    kinds = {field.name: int if field.type is int else str for field in fields(EngineStep)}
    return CompiledStep(
        step=EngineStep(**{name: kinds[name](row[name]) for name in FIELDS}),
        compiled_s=float(row["compiled_s"]) if row["compiled_s"] else None,
        exposed_s=float(row["exposed_s"]) if row["exposed_s"] else None,
        refusal=row["refusal"],
    )


def compile_missing(*words: str) -> None:
    """Compiles what the table lacks, one program at a time, and times the steps that differ only in their context."""
    known, programs = compiled_steps(), defaultdict[EngineStep, list[EngineStep]](list)
    for step in steps():
        if step not in known and all(word in str(step) for word in words):
            programs[step.program].append(step)
    for of_program in programs.values():
        with tempfile.TemporaryDirectory() as folder:
            _append(_timed(of_program, Path(folder)))
        print(f"{len(of_program)} steps of {of_program[0].program}", flush=True)


def _timed(of_program: Sequence[EngineStep], folder: Path) -> Iterator[CompiledStep]:
    """The steps of one program, which is compiled for the longest of them."""
    longest = max(of_program, key=lambda step: step.prompt)
    try:
        compile_experiment(
            longest.experiment(N_COMPILED),
            folder,
            progress=lambda *_: None,
            phases=[Phase(longest.phase)],
        )
    except MeshscopeError as error:
        for step in of_program:
            yield CompiledStep(step=step, refusal=str(error)[:200])
        return
    for step in of_program:
        deep = step.experiment()
        times, rest = divmod(deep.model.n_layers - N_COMPILED, N_FOLDED)
        assert not rest
        fold = Fold(first=FIRST_FOLDED, n_layers=N_FOLDED, times=times + 1)
        layers = ShallowLayers(layers=tuple(range(N_COMPILED)), folds=(fold,))
        (time,) = read_chunks(deep, Phase(step.phase), folder, layers=layers).times
        yield CompiledStep(step=step, compiled_s=time.step.value_s, exposed_s=time.exposed_s)


def store_golden() -> None:
    """Times the engines' programs that tests keep, most of two layers."""
    known, done = compiled_steps(), list[CompiledStep]()
    for name, case in golden.CASES.items():
        if case.release is None or "cache_dtype" in case.options:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = golden.replayed(name, Path(folder) / "run")
            experiment = run.record.manifest.experiment
        for time in run.record.times:
            step = _step_of(
                experiment,
                engine=case.arguments["frontend"],
                version=case.release,
                model=case.model,
                phase=time.phase,
                layers=case.layers or 0,
            )
            if time.source is Source.COMPILED and step not in known:
                seconds = {"compiled_s": time.step.value_s, "exposed_s": time.exposed_s}
                done.append(CompiledStep(step=step, **seconds))
    _append([*done, *(one for one in _measured_programs() if one.step not in known)])


def _measured_programs() -> Iterator[CompiledStep]:
    """The programs of published steps that tests keep, extended to all layers."""
    published = {step.id: step for step in published_steps()}
    with (PROGRAMS / "programs.csv").open() as file:
        next(file)  # a comment
        rows = list(csv.DictReader(file, delimiter=";"))
    for row in rows:
        experiment = ExperimentRecord(
            topology=parse_topology(row["topology"]),
            mesh={
                axis: int(size)
                for axis, _, size in (pair.partition("=") for pair in row["mesh"].split(","))
            },
            extended_layers=int(row["n_model_layers"]),
            phase=Phase(row["phase"]),
        )
        module = read_hlo(PROGRAMS / "programs" / f"{row['file']}.hlo.txt.gz")
        (time,) = read_imported(experiment, {row["file"]: module}).times
        step = of_published(published[row["step"]])
        assert step is not None
        yield CompiledStep(step=step, compiled_s=time.step.value_s, exposed_s=time.exposed_s)


def _append(done: Iterable[CompiledStep]) -> None:
    is_new = not CSV.exists()
    with CSV.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow([*FIELDS, "compiled_s", "exposed_s", "refusal"])
        for one in done:
            seconds = ("" if s is None else f"{s:.6g}" for s in (one.compiled_s, one.exposed_s))
            writer.writerow([*asdict(one.step).values(), *seconds, one.refusal])
            file.flush()


def published_s(published: PublishedStep) -> float | None:
    """Seconds of a published step by the engine's own program, if it was compiled."""
    step = of_published(published)
    return None if step not in compiled_steps() else compiled_steps()[step].compiled_s


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A compiled step of an engine beside the closed form."""

    step: EngineStep
    compiled_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over compiled, minus 1."""
        return self.predicted_s / self.compiled_s - 1


@cache
def compared() -> tuple[Compared, ...]:
    """Every step of an engine with a compiled time."""
    engines = set(Frontend)
    done = (
        one for one in compiled_steps().values() if one.step.engine in engines and one.compiled_s
    )
    return tuple(
        Compared(
            step=one.step, compiled_s=one.compiled_s or 0.0, predicted_s=one.step.predicted_s()
        )
        for one in done
    )


def summary() -> None:
    """Prints the errors of the closed form by engine, chip, phase and kind of model."""
    groups: dict[tuple[str, ...], list[Compared]] = {}
    for one in compared():
        step = one.step
        kind = "mixture" if read_model(step.model).moe else "dense"
        chip = step.topology.partition(":")[0]
        groups.setdefault(
            (f"{step.engine} {step.version}", chip, step.phase, step.weight_dtype, kind), []
        ).append(one)
    head = (
        "engine",
        "chip",
        "phase",
        "weights",
        "models",
        "steps",
        "median",
        "worst",
        "beyond 10 %",
    )
    rows = [
        (
            *key,
            str(len(of_group)),
            f"{median(abs(one.error) for one in of_group):.0%}",
            f"{max((one.error for one in of_group), key=abs):+.0%}",
            str(sum(abs(one.error) > FAR for one in of_group)),
        )
        for key, of_group in sorted(groups.items())
    ]
    _print_table(head, rows)


def far() -> None:
    """Prints the steps for which the closed form misses the engine's program by more than a tenth."""
    head = ("engine", "model", "slice, plan", "weights", "step", "compiled", "closed form", "")
    rows = [
        (
            f"{one.step.engine} {one.step.version}",
            one.step.model.rpartition("/")[2]
            + (f", {one.step.layers} layers" if one.step.layers else ""),
            f"`{one.step.topology}`, `{one.step.plan}`",
            one.step.weight_dtype,
            f"{one.step.phase}, {one.step.batch} x {one.step.prompt}",
            format_seconds(one.compiled_s),
            format_seconds(one.predicted_s),
            f"{one.error:+.0%}",
        )
        for one in sorted(compared(), key=lambda one: -abs(one.error))
        if abs(one.error) > FAR
    ]
    _print_table(head, rows)


def measured() -> None:
    """Prints the steps that were published with the program that was measured, or one of the same version."""
    compiled = compiled_steps()
    rows: list[Sequence[str]] = []
    for published in published_steps():
        step = of_published(published)
        if step is not None and step.version != NEWEST[Frontend.SGLANG_JAX] and step in compiled:
            seconds = compiled[step].compiled_s
            assert seconds is not None
            name = f"{step.model.rpartition('/')[2]} {step.phase}, {step.batch} x {step.prompt}"
            times = map(format_seconds, (seconds, published.device_s))
            where = f"`{step.topology}`, `{step.plan}`"
            rows.append((name, where, *times, f"{published.error_of(seconds):+.0%}"))
    _print_table(("program", "slice, plan", "simulated", "published", ""), rows)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for cells in (head, ["---"] * len(head), *rows):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["golden"]:
        store_golden()
    else:
        compile_missing(*sys.argv[1:])
