"""HBM bytes of compiled decode steps against the bytes that a step must move, for docs/kernels.md.

    python benchmarks/bytes_against_floor.py compile [WORD]  compiles the cases whose name contains the word

The floor has the weights as they are stored, with their scales, of experts those that balanced routing
reaches, the rows of the embedding, and the cache positions present. Activations are left out: they stay in
VMEM, or count as bytes beyond the floor. benchmarks/bytes_against_floor.csv stores the bytes by part, with
the libtpu version. Deep models are compiled with a few of their layers, unrolled, of which some repeat.
"""

import csv
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import NamedTuple

from meshscope.backends.compile.worker import compile_program, set_environment
from meshscope.cost.expert_load import expert_load
from meshscope.cost.steps import timed_step
from meshscope.events.enums import Part, Phase
from meshscope.events.step_time import StepTime
from meshscope.hardware.topology import parse_topology
from meshscope.model.arrays import Weight
from meshscope.model.config import read_model
from meshscope.model.layers import Layer, MlpKind
from meshscope.plans.caches import layer_cache
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.weights import (
    attention_weights,
    dense_weights,
    expert_weights,
    outer_weights,
    router_weights,
    shared_weights,
)
from meshscope.plans.workload import Workload
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import read_hlo
from meshscope.units import DTYPE_BITS, dtype_name, format_bytes

CSV = Path(__file__).with_suffix(".csv")
FIELDS = ("case", "part", "bytes", "floor_bytes", "libtpu")
SHOWN_FRAC = 0.01  # of the floor; smaller differences of a part are not named


class Case(NamedTuple):
    """A decode step of a model on a slice."""

    model: str
    topology: str
    plan: str
    dtype: str  # of weights
    cache: str = "bf16"
    batch: int = 8
    prompt: int = 1920
    output: int = 256

    @property
    def name(self) -> str:
        """Model, slice, plan and dtype in one line."""
        return f"{self.model.rpartition('/')[2]} {self.dtype}, {self.topology}, {self.plan}"

    @property
    def experiment(self) -> Experiment:
        """The experiment of the case."""
        return experiment_of(
            model=read_model(self.model),
            plan=parse_plan(self.plan),
            topology=parse_topology(self.topology),
            workload=Workload(
                batch=self.batch,
                prompt=self.prompt,
                output=self.output,
                weight_dtype=dtype_name(self.dtype),
                cache_dtype=dtype_name(self.cache),
            ),
        )


CASES = (
    Case("meta-llama/Llama-3.3-70B-Instruct", "v5e:4x4", "tp=16", "int8", "int8"),
    Case("meta-llama/Llama-3.3-70B-Instruct", "v5e:4x4", "dp=2,tp=8", "int8", "int8"),
    Case("meta-llama/Llama-3.1-8B-Instruct", "tpu7x:2x1x1", "tp=4", "fp8"),
    Case("Qwen/Qwen3-32B", "v6e-8", "tp=8", "bf16"),
    Case("openai/gpt-oss-120b", "v6e-8", "tp=8", "bf16", batch=64),
    Case("openai/gpt-oss-120b", "v6e-8", "tp=8,ep=8", "bf16", batch=64),
    Case("openai/gpt-oss-120b", "v6e-8", "tp=8", "fp8", batch=64),
    Case("Qwen/Qwen3-30B-A3B", "v5e-8", "tp=8,ep=8", "fp8", batch=64),
    Case("Qwen/Qwen3-30B-A3B", "tpu7x:2x1x1", "tp=4,ep=4", "int8", batch=64),
    Case("deepseek-ai/DeepSeek-V3.1", "v6e:8x8", "dp=8,tp=8,ep=64", "fp8_block128", batch=64),
)


def floor_bytes(experiment: Experiment) -> dict[Part, float]:
    """Bytes that one device must read in a decode step, by part."""
    totals: Counter[Part] = Counter()
    embed, *others = outer_weights(experiment.model, experiment.plan)
    rows = experiment.n_sequences(Phase.DECODE) / embed.shape[0]
    totals[Part.EMBED] += _bytes_of(experiment, [embed]) * rows
    is_tied = experiment.model.has_tied_embeddings
    totals[Part.LM_HEAD] += _bytes_of(experiment, [*others, embed] if is_tied else others)
    for layer in experiment.model.layers:
        for part, n_bytes in _layer_bytes(experiment, layer):
            totals[part] += n_bytes
    return dict(totals)


def _layer_bytes(experiment: Experiment, layer: Layer) -> Iterator[tuple[Part, float]]:
    model, plan = experiment.model, experiment.plan
    yield Part.ATTN, _bytes_of(experiment, attention_weights(model, plan, layer))
    yield Part.ATTN, _cache_bytes(experiment, layer)
    if layer.mlp is MlpKind.DENSE:
        yield Part.MLP, _bytes_of(experiment, dense_weights(model))
        return
    load = expert_load(experiment, Phase.DECODE)
    assert load is not None
    assert model.moe is not None
    reached_frac = load.experts / (model.moe.n_experts / plan.ep)
    yield Part.MOE_ROUTER, _bytes_of(experiment, router_weights(model))
    yield Part.MOE_EXPERTS, _bytes_of(experiment, expert_weights(model)) * reached_frac
    yield Part.MOE_SHARED, _bytes_of(experiment, shared_weights(model))


def _bytes_of(experiment: Experiment, weights: Iterable[Weight]) -> float:
    dtype = experiment.workload.weight_dtype
    return sum(weight.local_bytes(experiment.plan, dtype) for weight in weights)


def _cache_bytes(experiment: Experiment, layer: Layer) -> float:
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    n_seen = min(
        workload.mean_context, model.attention.window_of(layer.attention) or workload.context
    )
    elements = sum(
        prod(array.local_shape(plan)) * (array.n_fixed_slots or n_seen / array.rate)
        for array in layer_cache(model, plan, layer)
    )
    n_sequences = experiment.n_sequences(Phase.DECODE)
    return elements * n_sequences * DTYPE_BITS[workload.cache_dtype] / 8


def compiled_step(experiment: Experiment) -> StepTime:
    """The decode step of the whole model, from the scheduled HLO of a few layers."""
    layers = experiment.shallow_layers
    compiled = experiment if layers is None else experiment.unrolled(layers)
    with tempfile.TemporaryDirectory() as folder:
        compile_program(compiled, Phase.DECODE, -1, Path(folder))
        module = read_hlo(Path(folder) / f"{Phase.DECODE}.hlo.txt.gz")
    collectives = module_collectives(
        module, mesh=compiled.plan.mesh, crosses_slices=compiled.topology.crosses_slices
    )
    return timed_step(
        module,
        collectives,
        phase=Phase.DECODE,
        topology=compiled.topology,
        experts=expert_load(compiled, Phase.DECODE),
        layers=layers,
        lengths=compiled.sequence_lengths(Phase.DECODE),
    ).time


def compile_cases(word: str = "") -> None:
    """Compiles the cases whose name contains `word`, and stores their bytes."""
    set_environment()
    for case in CASES:
        if word in case.name:
            _store(case)


def _store(case: Case) -> None:
    moved = {part.part: part.hbm_bytes or 0.0 for part in compiled_step(case.experiment).parts}
    floor = {part.value: n_bytes for part, n_bytes in floor_bytes(case.experiment).items()}
    rows = [row for row in _stored() if row["case"] != case.name]
    for part in dict.fromkeys((*floor, *moved)):
        figures = (round(moved.get(part, 0.0)), round(floor.get(part or "", 0.0)))
        values = (case.name, part or "", *map(str, figures), version("libtpu"))
        rows.append(dict(zip(FIELDS, values, strict=True)))
    names = [c.name for c in CASES]
    with CSV.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: names.index(row["case"])))


def _stored() -> list[dict[str, str]]:
    if not CSV.exists():
        return []
    with CSV.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table() -> None:
    """Prints one row per case: floor, compiled bytes, their ratio, and the parts beyond the floor."""
    print("| decode step | floor | compiled | ratio | beyond the floor |")
    print("|---|---|---|---|---|")
    stored = _stored()
    for case in CASES:
        rows = [row for row in stored if row["case"] == case.name]
        if rows:
            print(_line(case, rows))


def _line(case: Case, rows: list[dict[str, str]]) -> str:
    moved, floor = (sum(int(row[name]) for row in rows) for name in ("bytes", "floor_bytes"))
    excess = {row["part"] or "between parts": _excess(row) for row in rows}
    named = ", ".join(
        f"{part} {'+' if n > 0 else '-'}{format_bytes(abs(n))}"
        for part, n in sorted(excess.items(), key=lambda item: -item[1])
        if abs(n) >= SHOWN_FRAC * floor
    )
    cells = (
        f"{case.name}, batch {case.batch}",
        format_bytes(floor),
        format_bytes(moved),
        f"{moved / floor:.2f}",
        named,
    )
    return f"| {' | '.join(cells)} |"


def _excess(row: dict[str, str]) -> int:
    return int(row["bytes"]) - int(row["floor_bytes"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        compile_cases(*sys.argv[2:3])
    table()
