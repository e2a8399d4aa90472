"""Predicted equals compiled for a small model of every family, on every axis."""

from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import pytest
from compared import assert_predicted_equals_compiled
from made import experiment_with
from small_configs import CONFIGS, FEW_AXES, OTHER_PLAN, OTHER_SLICES, plans_of, small_model
from tables import cases

from meshscope.model.config import model_from_config
from meshscope.model.families import Family
from meshscope.model.layers import repeats_of
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = [pytest.mark.tpu, pytest.mark.slow]


SIZES = {"batch": 8, "prompt": 128, "output": 16}


class Case(NamedTuple):
    family: str
    topology: str
    plan: str
    loop: Loop = Loop.UNROLL

    @property
    def experiment(self) -> Experiment:
        plan = parse_plan(self.plan)
        scanned_layers = 8 if plan.pp > 1 else 6  # in which the kinds of some layers repeat
        model = small_model(self.family, scanned_layers if self.loop is Loop.SCAN else None)
        program = Program(loop=self.loop)
        return experiment_with(model, plan, self.topology, program=program, **SIZES)


CASES = cases(__file__, Case, "cases")
MATRIX = [
    Case(family, "v6e-8", plan, loop) for family in CONFIGS for plan, loop in plans_of(family)
] + [
    Case(family, topology, OTHER_PLAN)
    for family, topology in zip(CONFIGS, cycle(OTHER_SLICES), strict=False)
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in MATRIX)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_predicted_equals_compiled(case: Case, tmp_path: Path) -> None:
    assert_predicted_equals_compiled(case.experiment, tmp_path)


FP8_MXFP4 = "f8e4m3fn_block32_f4e2m1fn_experts"
SUMMED_WHOLE = "under cp, the sum over tp of streams [4,32,1024] of last positions is an all-reduce"


class SharedEntries(NamedTuple):
    plan: str
    loop: Loop
    weight_dtype: str = FP8_MXFP4
    prefill_chunk: int | None = None


SHARED_ENTRIES = cases(__file__, SharedEntries, "shared_entries")
MORE_SHARED_ENTRIES = cases(__file__, SharedEntries, "shared_entries_of_matrix")
NOT_PREDICTED = SharedEntries("cp=2,fsdp=2,tp=2,sp", Loop.UNROLL)
XFAIL = (pytest.mark.matrix, pytest.mark.xfail(strict=True, reason=SUMMED_WHOLE))


@pytest.mark.parametrize(
    "case",
    [
        *SHARED_ENTRIES,
        *(pytest.param(case, marks=pytest.mark.matrix) for case in MORE_SHARED_ENTRIES),
        pytest.param(NOT_PREDICTED, marks=XFAIL),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_predicted_equals_compiled_with_shared_entries(case: SharedEntries, tmp_path: Path) -> None:
    """DeepSeek-V4.1 at a prompt of several windows, so that its second half has fewer tokens."""
    model = model_from_config(FEW_AXES, name="small-v41", source="test")
    plan, loop, *_ = case
    sizes = {**SIZES, "weight_dtype": case.weight_dtype, "prefill_chunk": case.prefill_chunk}
    experiment = experiment_with(model, plan, "v6e-8", program=Program(loop=loop), **sizes)
    assert_predicted_equals_compiled(experiment, tmp_path)


def test_every_family_has_a_small_model_whose_layers_repeat() -> None:
    assert {small_model(name).family for name in CONFIGS} == set(Family) - {"deepseek_v41_text"}
    for name in CONFIGS:
        repeats = repeats_of(small_model(name, 6).layers)
        assert max(repeat.times for repeat in repeats) > 1, name
