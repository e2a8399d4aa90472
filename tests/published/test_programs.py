"""Measured programs: their compiled schedules, simulated, against the published times.

The programs have fewer layers than the models, except DeepSeek-R1. The others are extended to all layers.
Their compiler is newer than that of the measurements.
"""

from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
from tables import read_cases

from meshscope.analysis.roofline import OTHER, step_floor
from meshscope.backends.compile.import_hlo import read_imported
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.parse import read_hlo

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
R1 = "jax_llm_examples-deepseek-r1-int8-v5e_8x8-decode-batch8-cache2048-61layers"


class Program(NamedTuple):
    """A compiled program, and the published time of the whole model's step."""

    name: str
    file: str
    topology: str
    mesh: str
    phase: Phase
    n_layers: int  # in the program
    n_model_layers: int
    published_ms: float
    step: str  # its row in tools/published_steps.csv

    @property
    def axes(self) -> dict[str, int]:
        pairs = (pair.split("=") for pair in self.mesh.split(","))
        return {axis: int(size) for axis, size in pairs}


PROGRAM_OF = {p.name: p for p in read_cases(Path(__file__).parent / "programs.csv", Program)}


@cache
def _module(name: str) -> HloModule:
    return read_hlo(PROGRAMS / f"{PROGRAM_OF[name].file}.hlo.txt.gz")


@cache
def _time(name: str, n_layers: int | None = None) -> StepTime:
    """The step of the program as `import --layers` times it, with all layers of the model."""
    program = PROGRAM_OF[name]
    experiment = ExperimentRecord(
        topology=parse_topology(program.topology),
        mesh=program.axes,
        extended_layers=n_layers or program.n_model_layers,
        phase=program.phase,
    )
    (time,) = read_imported(experiment, {name: _module(name)}).times
    return time


def _layer_s(name: str) -> float:
    """Time that each further layer takes."""
    program = PROGRAM_OF[name]
    n_more = program.n_model_layers - program.n_layers
    return (_model_s(name) - _time(name, program.n_layers).step.value_s) / n_more


def _model_s(name: str) -> float:
    """The step of the whole model."""
    return _time(name).step.value_s


@pytest.mark.parametrize("name", PROGRAM_OF)
def test_simulated_step_takes_the_published_time(name: str):
    step, published_s = _time(name).step, PROGRAM_OF[name].published_ms / 1e3
    assert step.value_s == pytest.approx(published_s, rel=0.15)
    assert step.low_s <= published_s <= step.high_s


@pytest.mark.parametrize("batch", [8, 32])
def test_small_batches_are_bound_by_the_hbm(batch: int):
    """The HBM of a device is busy for 85 to 100 % of a layer, as the published steps show."""
    name = f"llama-70b tp16 batch {batch}"
    weights, cache_of_sequence = 53.7e6, 2 * 2048 * 128
    busy_s = (weights + batch * cache_of_sequence) / 819e9
    assert 0.75 <= busy_s / _layer_s(name) <= 1


@pytest.mark.parametrize("name", PROGRAM_OF)
def test_causes_beyond_the_floor_are_known_and_add_up(name: str):
    time = _time(name)
    spent = time.activities
    assert sum(s.seconds for s in spent) == pytest.approx(time.step.value_s)
    assert all(0 <= s.hbm_busy_s <= s.seconds + 1e-12 for s in spent)
    assert sum(s.flops for s in spent) == pytest.approx(time.flops)
    assert sum(s.wire_bytes for s in spent) == pytest.approx(
        sum(part.wire_bytes or 0.0 for part in time.parts)
    )
    chip = parse_topology(PROGRAM_OF[name].topology).chip
    floor = step_floor(time, chip)
    caused_s = time.step.value_s - floor.floor_s
    assert sum(cause.seconds for cause in floor.causes) == pytest.approx(caused_s)
    assert all(cause.seconds > 0 for cause in floor.causes)
    unknown_s = sum(cause.seconds for cause in floor.causes if cause.cause == OTHER)
    assert unknown_s < 0.05 * time.step.value_s


def test_median_error_of_the_published_programs() -> None:
    errors = [abs(_model_s(n) * 1e3 / p.published_ms - 1) for n, p in PROGRAM_OF.items()]
    assert median(errors) < 0.08


def test_plans_rank_as_published():
    """TP16 decodes a batch of 8 1.9 times as fast as DP2 x TP8."""
    ratio = _model_s("llama-70b dp2,tp8 batch 8") / _model_s("llama-70b tp16 batch 8")
    assert ratio == pytest.approx(11.85 / 6.29, rel=0.15)


def test_deepseek_r1_copies_the_down_projections_of_all_experts():
    """docs/evidence/accuracy.md: 58.7 MB in 57 layers, and 8.5 of 11.0 GB for experts."""
    name = "deepseek-r1 batch 8"
    entry = _module(name).entry
    copies = [
        instruction
        for instruction in entry.instructions
        if instruction.opcode == "copy-start" and "s8[32,256,7168]" in instruction.shape_text
    ]
    assert len(copies) == 57

    of_part = {part.part: part.hbm_bytes or 0.0 for part in _time(name).parts}
    assert of_part["moe.experts"] == pytest.approx(8.5e9, rel=0.01)
    assert sum(of_part.values()) == pytest.approx(11.0e9, rel=0.01)
