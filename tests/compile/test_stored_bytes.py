"""Compiled programs read weights as they are stored, and write none."""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
from compared import compiled
from made import experiment_with
from tables import cases

from meshscope.backends.compile import compile as compiling
from meshscope.events.enums import Phase
from meshscope.model.config import read_model
from meshscope.plans.caches import layer_cache
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Loop, Program
from meshscope.plans.weights import layer_weights, outer_weights
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.hlo.parse import read_hlo
from meshscope.workers import Worker

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = pytest.mark.tpu

PROMPT, OUTPUT = 1024, 256
MIN_ELEMENTS = 200_000  # of a weight; activations of eight tokens have fewer
ARRAY = re.compile(r"[a-z]\w*\[([\d,]*)\](\{[^{}]*\})?")
ON_CHIP = re.compile(r"S\([13]\)")  # VMEM, and the memory that the cores of a v4 share
REFERENCES = frozenset({"parameter", "bitcast", "get-tuple-element", "tuple"})


class Case(NamedTuple):
    """A decode step; two layers of DeepSeek-V2-Lite are a dense one and one of experts."""

    model: str
    topology: str
    dtype: str
    n_layers: int = 1
    plan: str = "tp=8"
    batch: int = 8
    min_elements: int = MIN_ELEMENTS

    @property
    def experiment(self) -> Experiment:
        options = {"n_layers": self.n_layers, "program": Program(loop=Loop.UNROLL)}
        sizes = {"batch": self.batch, "prompt": PROMPT, "output": OUTPUT}
        options |= {"weight_dtype": self.dtype, **sizes}
        return experiment_with(self.model, self.plan, self.topology, **options)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process that compiles one program after the other."""
    with Worker(compiling.WORK, tmp_path_factory.mktemp("worker")) as started:
        yield started


CASES = cases(__file__, Case, "cases")
MATRIX = cases(__file__, Case, "matrix")


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in MATRIX)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_a_decode_step_writes_no_weight_to_hbm_and_copies_no_cache(case, worker, tmp_path) -> None:
    """No result in HBM is as large as a weight, and no copy to any memory as large as a cache array.

    Nor is a matrix of 4 bits copied into another layout, in any memory.
    """
    experiment = case.experiment
    model, plan = experiment.model, experiment.plan
    matrices = [
        *(w for layer in model.layers for w in layer_weights(model, plan, layer) if w.inputs),
        *outer_weights(model, plan),
    ]
    weights = {
        n: weight.name
        for weight in matrices
        if (n := prod(weight.local_shape(plan))) >= case.min_elements
    }
    cache = {
        case.batch * (PROMPT + OUTPUT) * prod(array.local_shape(plan)): array.name
        for layer in model.layers
        for array in layer_cache(model, plan, layer)
    }

    results = [
        (instruction.opcode, n, is_in_hbm)
        for instruction in _decode_instructions(experiment, worker, tmp_path)
        for n, is_in_hbm in _results(instruction)
    ]

    assert [weights[n] for _, n, is_in_hbm in results if is_in_hbm and n in weights] == []
    if case.dtype.startswith("s4"):
        assert [weights[n] for opcode, n, _ in results if opcode == "copy" and n in weights] == []
    assert [cache[n] for opcode, n, _ in results if "copy" in opcode and n in cache] == []


def _results(instruction: Instruction) -> Iterator[tuple[int, bool]]:
    """Elements of each array that an instruction writes, and whether it is in HBM."""
    opcode, target = instruction.opcode, instruction.custom_call_target
    is_reference = opcode in REFERENCES or opcode.endswith(("-start", "-update"))
    if is_reference or target not in {None, "tpu_custom_call"}:
        return
    for dims, layout in ARRAY.findall(instruction.shape_text):
        yield prod(int(size) for size in dims.split(",") if size), ON_CHIP.search(layout) is None


def _decode_instructions(
    experiment: Experiment, worker: Worker, folder: Path
) -> tuple[Instruction, ...]:
    """The scheduled instructions of the decode program."""
    program = compiling._Program(experiment=experiment, phase=Phase.DECODE, folder=folder)
    request = {"experiment": experiment.as_dict(), "phase": "decode", "folder": str(folder)}
    worker.do({**request, "chunk": program.chunk}, compiling._task(program, None))
    return read_hlo(folder / "decode.hlo.txt.gz").entry.instructions


pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
EXPERT_COLUMNS = 360  # of gpt-oss on one of eight devices: they do not fill tiles of 128


def test_narrow_experts_are_read_as_stored(tmp_path: Path) -> None:
    """A layer of the model with a quarter of its experts and of its vocabulary."""
    model = read_model("openai/gpt-oss-20b")
    assert model.moe.ffn // 8 == EXPERT_COLUMNS
    model = replace(model, moe=replace(model.moe, n_experts=8), vocab=model.vocab // 4)
    options = {"batch": 8, "prompt": 128, "n_layers": 1, "program": Program(loop=Loop.UNROLL)}
    experiment = experiment_with(model, "tp=8", "v6e-8", **options)

    compiled(experiment, tmp_path)

    for phase in experiment.phases:
        entry = read_hlo(tmp_path / f"{phase}.hlo.txt.gz").entry
        copied = [i.op_name or "" for i in entry.instructions if i.opcode == "copy"]
        weights = [name for name in copied if name.startswith("weights")]
        assert [name for name in weights if "experts_w" in name or "embed" in name] == []
