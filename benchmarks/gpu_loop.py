"""Measures decode and prefill on one GPU, predicts them, and judges the prediction.

On the machine with the GPU, then anywhere:

    meshscope calibrate --topology h200:1 --out FOLDER/profile.json
    python benchmarks/gpu_loop.py measure FOLDER            # --set full: all layers of Qwen3-8B
    python benchmarks/gpu_loop.py judge FOLDER

`measure` writes the compiled HLO of each case and a line of times to FOLDER/loop.jsonl, and starts no
case after --budget seconds; the next call goes on with the cases that are left. `judge` walks the HLO with the published
peaks; the profile has the rates of the floor. Every second case fits one factor for each phase; the others judge it. It writes benchmarks/gpu_loop.csv, or --csv; all layers of Qwen3-8B
are in benchmarks/gpu_loop_full.csv.
`--topology cpu:1` with `--set cpu` rehearses both without a GPU.
"""

import argparse
import csv
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from meshscope.backends.compile.read import read_phase
from meshscope.events.enums import Phase
from meshscope.hardware.interconnect.profile import ChipProfile, load_profile
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.model.mechanisms.grouped import GroupedAttention
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.workload import Workload

CSV = Path(__file__).with_suffix(".csv")
RESULTS, HLO = "loop.jsonl", "hlo"
QWEN3_8B, QWEN3_4B, LLAMA = "Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B"
N_STEPS, N_CPU_STEPS = 64, 4  # of decode that are timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request; `context` is prompt and output together, the length of the static cache.

    `context` is a multiple of 64: XLA for GPUs copies caches of other lengths in each step, to pad them.
    """

    model: str = QWEN3_8B
    layers: int | None = 4
    batch: int = 1
    context: int = 1152
    output: int = 128
    weights: str = "bf16"
    phases: tuple[str, ...] = ("prefill", "decode")

    def experiment(self, topology: str) -> Experiment:
        """The experiment on one device, with its layers one after the other."""
        is_cpu = topology.startswith("cpu")
        dtype = "f32" if is_cpu else "bf16"
        return experiment_of(
            model=read_model(self.model),
            plan=parse_plan("tp=1"),
            topology=parse_topology(topology),
            workload=Workload(
                batch=self.batch,
                prompt=self.context - self.output,
                output=self.output,
                weight_dtype=dtype if is_cpu else self.weights,
                activation_dtype=dtype,
                cache_dtype=dtype,
            ),
            program=Program(loop=Loop.UNROLL),
            n_layers=self.layers,
        )


DECODE: tuple[str, ...] = ("decode",)

# Twenty experiments of a few layers, cheap to compile: batch, context, weights, model.
SHALLOW: tuple[Case, ...] = (
    *(Case(batch=batch) for batch in (1, 8, 64)),
    *(Case(batch=batch, weights="f8e4m3fn") for batch in (1, 8, 64)),
    Case(layers=2),
    Case(layers=8),
    Case(context=8320),
    Case(context=4224, batch=2),
    Case(context=32896, phases=DECODE),
    Case(context=32896, batch=8, phases=DECODE),
    Case(context=32896, weights="f8e4m3fn", phases=DECODE),
    Case(model=QWEN3_4B),
    Case(model=QWEN3_4B, batch=16),
    Case(model=LLAMA),
    Case(model=LLAMA, batch=32),
    Case(model=LLAMA, context=4224),
    Case(model="Qwen/Qwen3-32B", layers=2),
    Case(model="Qwen/Qwen3-32B", layers=2, batch=8),
)
# The table of docs/evidence/gpus.md: every layer of Qwen3-8B. 64 sequences of 32k do not fit the card.
FULL: tuple[Case, ...] = (
    Case(layers=None),
    Case(layers=None, context=8320, phases=("prefill",)),
    *(Case(layers=None, batch=batch, phases=DECODE) for batch in (8, 64)),
    *(Case(layers=None, batch=batch, weights="f8e4m3fn", phases=DECODE) for batch in (1, 8, 64)),
    *(Case(layers=None, batch=batch, context=32896, phases=DECODE) for batch in (1, 8)),
    *(
        Case(layers=None, batch=batch, context=32896, weights="f8e4m3fn", phases=DECODE)
        for batch in (1, 8)
    ),
)
CPU: tuple[Case, ...] = tuple(
    Case(model=QWEN3_4B, layers=1, batch=batch, context=context, output=8)
    for batch in (1, 4)
    for context in (64, 128)
)
SETS = {"shallow": SHALLOW, "full": FULL, "cpu": CPU}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds of one phase of a case; `queued_s` of decode steps that the host does not wait for.

    `n_bytes` are the weights and the cache, each once; `flops` those of the model.
    """

    case: int
    phase: str
    seconds: float
    queued_s: float | None
    n_bytes: float
    flops: float
    compile_s: float


def measure(folder: Path, topology: str, cases: tuple[Case, ...], budget_s: float) -> None:
    """Measures case after case but those in the folder; a case that fails is reported and left out."""
    import jax  # noqa: PLC0415  slow to import

    (folder / HLO).mkdir(parents=True, exist_ok=True)
    file = folder / RESULTS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    measured = {(line["case"], line["phase"]) for line in map(json.loads, lines)}
    started = time.monotonic()
    for index, case in enumerate(cases):
        passed_s = time.monotonic() - started
        if passed_s > budget_s:
            print(f"{len(cases) - index} cases were not begun after {passed_s:.0f} s")
            return
        for phase in map(Phase, case.phases):
            if (index, phase.value) in measured:
                continue
            try:
                result = _measured(case, index, phase, topology, folder, jax.devices()[0])
            except (RuntimeError, ValueError) as error:  # XLA's errors: out of memory, unsupported
                print(f"case {index} {phase} failed: {str(error)[:300]}", flush=True)
                continue
            line = json.dumps({**asdict(result), "request": asdict(case), "topology": topology})
            with file.open("a", encoding="utf-8") as results:
                results.write(line + "\n")
            print(f"{time.monotonic() - started:5.0f} s  {line}", flush=True)


def _measured(  # noqa: PLR0913, PLR0917  a case and where it runs
    case: Case, index: int, phase: Phase, topology: str, folder: Path, device: Any
) -> Measurement:
    import jax  # noqa: PLC0415  slow to import
    import numpy as np  # noqa: PLC0415

    from meshscope.programs.jax.build import build_program  # noqa: PLC0415
    from meshscope.programs.jax.values import random_weights  # noqa: PLC0415

    experiment = case.experiment(topology)
    program = build_program(experiment, phase, [device])
    before = time.perf_counter()
    compiled = program.lower().compile()
    compile_s = time.perf_counter() - before
    with gzip.open(_hlo_file(folder, index, phase), "wt", 1, encoding="utf-8") as file:
        file.write(compiled.as_text())
    weights = random_weights(program, seed=0)
    _, tokens, cache, _ = program.arguments
    ids = np.random.default_rng(0).integers(0, experiment.model.vocab, tokens.shape, dtype=np.int32)
    new_cache = _cache_maker(cache)
    if phase is Phase.PREFILL:
        seconds, queued_s = _prefill_s(compiled, weights, ids, new_cache), None
    else:
        n_steps = N_CPU_STEPS if topology.startswith("cpu") else N_STEPS
        first = experiment.workload.prompt
        steps = [jax.device_put(np.int32(first + step), device) for step in range(n_steps)]
        seconds, queued_s = _decode_s(compiled, weights, ids, new_cache(), steps)
    return Measurement(
        case=index,
        phase=phase.value,
        seconds=seconds,
        queued_s=queued_s,
        n_bytes=_bytes(weights, cache, has_cache=phase is Phase.DECODE),
        flops=_flops(experiment, phase),
        compile_s=compile_s,
    )


def _hlo_file(folder: Path, index: int, phase: Phase) -> Path:
    return folder / HLO / f"{index}.{phase}.hlo.txt.gz"


def _cache_maker(abstract: Any) -> Callable[[], Any]:
    """Makes a cache of small random numbers: zeros would let products run faster than in a request."""
    import jax  # noqa: PLC0415  slow to import
    import jax.numpy as jnp  # noqa: PLC0415

    leaves, structure = jax.tree.flatten(abstract)

    # One program for each shape: one for all layers takes XLA for GPUs minutes to compile.
    @partial(jax.jit, static_argnums=(1, 2))
    def random(index: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return (jax.random.normal(jax.random.key(index), shape, jnp.bfloat16) * 0.1).astype(dtype)

    def new_cache() -> Any:
        made = [random(index, leaf.shape, leaf.dtype) for index, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, made)

    return new_cache


def _prefill_s(compiled: Any, weights: Any, ids: Any, new_cache: Callable[[], Any]) -> float:
    """The median of five prefills, after one that is not timed."""
    import jax  # noqa: PLC0415  slow to import
    import numpy as np  # noqa: PLC0415

    tokens, start = jax.device_put(ids), jax.device_put(np.int32(0))
    walls_s: list[float] = []
    for _ in range(6):
        cache = jax.block_until_ready(new_cache())
        before = time.perf_counter()
        out = compiled(weights, tokens, cache, start)
        jax.block_until_ready(out[0])
        walls_s.append(time.perf_counter() - before)
        del out, cache
    return median(walls_s[1:])


def _decode_s(
    compiled: Any, weights: Any, ids: Any, cache: Any, steps: list[Any]
) -> tuple[float, float]:
    """The median of steps that are waited for, and the mean of steps queued back to back."""
    import jax  # noqa: PLC0415  slow to import

    as_input = jax.jit(lambda tokens: tokens[:, None])
    tokens = jax.device_put(ids)[:, 0]

    def step(tokens: Any, cache: Any, position: Any) -> tuple[Any, Any]:
        tokens, _, cache = compiled(weights, as_input(tokens), cache, position)
        return tokens, cache

    for position in steps[:3]:
        tokens, cache = step(tokens, cache, position)
    jax.block_until_ready(tokens)
    walls_s: list[float] = []
    for position in steps:
        before = time.perf_counter()
        tokens, cache = step(tokens, cache, position)
        jax.block_until_ready(tokens)
        walls_s.append(time.perf_counter() - before)
    before = time.perf_counter()
    for position in steps:
        tokens, cache = step(tokens, cache, position)
    jax.block_until_ready(tokens)
    return median(walls_s), (time.perf_counter() - before) / len(steps)


def _bytes(weights: Any, cache: Any, *, has_cache: bool) -> float:
    """Bytes of the weights without the embedding table, of which a step reads a few rows, and of the cache."""
    import jax  # noqa: PLC0415  slow to import

    table = {key: leaf for key, leaf in weights.items() if key == "embed" and "lm_head" in weights}
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    n_bytes -= sum(leaf.nbytes for leaf in table.values())
    if has_cache:
        n_bytes += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    return float(n_bytes)


def _flops(experiment: Experiment, phase: Phase) -> float:
    """Two for each weight of a dense model and row; the head for the last position; causal attention."""
    model, workload = experiment.model, experiment.workload
    attention = model.attention
    assert isinstance(attention, GroupedAttention)
    heads = attention.n_heads + 2 * attention.n_kv_heads
    width = attention.head_dim * (heads + attention.n_heads)
    assert model.ffn is not None
    layer = model.hidden * (width + 3 * model.ffn)
    n_rows = workload.batch * (workload.prompt if phase is Phase.PREFILL else 1)
    n_keys = workload.prompt / 2 if phase is Phase.PREFILL else workload.context
    scores = 2 * attention.n_heads * attention.head_dim * n_keys
    head = 2.0 * model.hidden * model.vocab * workload.batch
    return 2.0 * n_rows * model.n_layers * (layer + scores) + head


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A measurement beside its predictions, all in seconds."""

    case: Case
    measurement: Measurement
    is_fitted: bool
    floor_s: float
    published_s: float
    corrected_s: float = 0.0

    @property
    def measured_s(self) -> float:
        """The time of queued steps if they were timed, else of those that are waited for."""
        queued_s = self.measurement.queued_s
        return self.measurement.seconds if queued_s is None else queued_s


def judge(folder: Path, csv_file: Path) -> dict[str, float]:
    """Writes the table and prints it; the median errors of the cases that were not fitted."""
    profile = load_profile(folder / "profile.json")
    rows = list(corrected(list(_judged(folder, profile))))
    _write(rows, csv_file)
    for row in rows:
        print(
            f"{row.case.model:24} {row.case.layers or 'all':>4} layers, batch {row.case.batch:3}, context "
            f"{row.case.context:6}, {row.case.weights:9} {row.measurement.phase:8}"
            f"{row.measured_s * 1e3:9.3f} ms, floor {row.floor_s / row.measured_s:4.0%}, published "
            f"{row.published_s / row.measured_s - 1:+5.0%}, corrected "
            f"{row.corrected_s / row.measured_s - 1:+5.0%}{'' if row.is_fitted else '  judged'}"
        )
    held_out = [row for row in rows if not row.is_fitted]
    errors = {
        name: median(abs(getattr(row, name) / row.measured_s - 1) for row in held_out)
        for name in ("published_s", "corrected_s")
    }
    print(f"median errors of {len(held_out)} that were not fitted: {errors}")
    return errors


def _judged(folder: Path, profile: ChipProfile) -> Iterator[Judged]:
    flops_per_s, bytes_per_s = profile.flops_per_s, profile.memory_bytes_per_s
    assert flops_per_s is not None
    assert bytes_per_s is not None
    for line in (folder / RESULTS).read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        request, topology = values.pop("request"), values.pop("topology")
        request["phases"] = tuple(request["phases"])
        case, measurement = Case(**request), Measurement(**values)
        experiment, phase = case.experiment(topology), Phase(measurement.phase)
        path = _hlo_file(folder, measurement.case, phase)
        walked = read_phase(experiment, phase, path, chip_profile=profile)[1]  # its rates for CPUs
        yield Judged(
            case=case,
            measurement=measurement,
            is_fitted=measurement.case % 2 == 0,
            floor_s=max(measurement.flops / flops_per_s, measurement.n_bytes / bytes_per_s),
            published_s=walked.time.step.value_s,
        )


def corrected(rows: list[Judged]) -> Iterator[Judged]:
    """The rows with the prediction times the median factor of the fitted cases of their phase."""
    for row in rows:
        logs = [
            log(other.measured_s / other.published_s)
            for other in rows
            if other.is_fitted and other.measurement.phase == row.measurement.phase
        ]
        yield replace(row, corrected_s=row.published_s * (exp(median(logs)) if logs else 1.0))


def _write(rows: list[Judged], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = ["model", "layers", "batch", "context", "output", "weight_dtype", "phase", "role"]
        times = ["measured_s", "waited_s", "floor_s", "published_s", "corrected_s"]
        writer.writerow([*names, *times])
        for row in rows:
            case, role = row.case, "fitted" if row.is_fitted else "judged"
            request = [case.model, case.layers or "all", case.batch, case.context, case.output]
            seconds = [row.measured_s, row.measurement.seconds, row.floor_s]
            seconds += [row.published_s, row.corrected_s]
            writer.writerow([*request, case.weights, row.measurement.phase, role, *seconds])


def main(arguments: list[str]) -> None:
    """Measures or judges."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=["measure", "judge"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--topology", default="h200:1")
    parser.add_argument("--set", dest="cases", choices=SETS, default="shallow")
    parser.add_argument("--budget", type=float, default=500)
    parser.add_argument("--csv", type=Path, default=CSV)
    options = parser.parse_args(arguments)
    if options.command == "measure":
        measure(options.folder, options.topology, SETS[options.cases], options.budget)
    else:
        judge(options.folder, options.csv)


if __name__ == "__main__":
    main(sys.argv[1:])
