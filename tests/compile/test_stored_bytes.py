"""A compiled decode step reads 8-bit and 4-bit weights and the cache where and as they are stored."""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
from tables import cases

from meshscope.backends.compile import compile as compiling
from meshscope.events.enums import Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.caches import layer_cache
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.weights import layer_weights, outer_weights
from meshscope.plans.workload import Workload
from meshscope.readers.hlo.module import Instruction
from meshscope.readers.hlo.parse import read_hlo

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = pytest.mark.tpu

WORKLOAD = Workload(batch=8, prompt=1024, output=256)
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
    batch: int = WORKLOAD.batch
    min_elements: int = MIN_ELEMENTS

    @property
    def experiment(self) -> Experiment:
        return experiment_of(
            model=read_model(self.model),
            plan=parse_plan(self.plan),
            topology=parse_topology(self.topology),
            workload=Workload(
                batch=self.batch,
                prompt=WORKLOAD.prompt,
                output=WORKLOAD.output,
                weight_dtype=self.dtype,
            ),
            program=Program(loop=Loop.UNROLL),
            n_layers=self.n_layers,
        )


V2_LITE = "deepseek-ai/DeepSeek-V2-Lite"
CASES = cases(__file__, Case, "cases")
MATRIX = cases(__file__, Case, "matrix")


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in MATRIX)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_a_decode_step_writes_no_weight_to_hbm_and_copies_no_cache(case, tmp_path) -> None:
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
        case.batch * WORKLOAD.context * prod(array.local_shape(plan)): array.name
        for layer in model.layers
        for array in layer_cache(model, plan, layer)
    }

    results = [
        (instruction.opcode, n, is_in_hbm)
        for instruction in _decode_instructions(experiment, tmp_path)
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


def _decode_instructions(experiment: Experiment, folder: Path) -> tuple[Instruction, ...]:
    """The scheduled instructions of the decode program, compiled in a process of its own."""
    program = compiling._Program(experiment=experiment, phase=Phase.DECODE, folder=folder)
    compiling._run_workers((program,), lambda *_: None)
    entry = read_hlo(folder / f"{Phase.DECODE}.hlo.txt.gz").entry
    return entry.instructions
