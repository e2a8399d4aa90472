"""A deep model is timed by a shallow unrolled program, and counted by the scanned one."""

from pathlib import Path

import pytest
from compared import compiled
from made import experiment_with

from meshscope.cost.collectives import predict
from meshscope.cost.steps import timeline_table
from meshscope.events.timeline import unfolded
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Loop, Program

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = pytest.mark.tpu


def _experiment(loop: Loop) -> Experiment:
    sizes = {"batch": 8, "prompt": 128, "output": 2, "n_layers": 12}  # of which eight are unrolled
    return experiment_with("Llama-3.2-3B", "tp=8", "v6e-8", program=Program(loop=loop), **sizes)


def test_a_deep_step_takes_the_time_of_its_unrolled_layers(tmp_path: Path) -> None:
    for loop in (Loop.AUTO, Loop.UNROLL):
        (tmp_path / loop).mkdir()
    auto, whole = (
        compiled(_experiment(loop), tmp_path / loop) for loop in (Loop.AUTO, Loop.UNROLL)
    )
    steps = [[step.time for step in result.steps] for result in (auto, whole)]
    for shallow, unrolled in zip(*steps, strict=True):
        # Weights are copied before the first layer in an order that depends on their number.
        assert shallow.step.value_s == pytest.approx(unrolled.step.value_s, rel=0.02)
        assert shallow.exposed_s == pytest.approx(unrolled.exposed_s, rel=0.02)
    assert len(auto.rows) == len(predict(_experiment(Loop.AUTO)))
    assert all(row.dur_s is not None and row.start_s is not None for row in auto.rows)
    for step in auto.steps:
        spans = unfolded(timeline_table([step]))
        end_s = (spans["start_s"] + spans["dur_s"]).max()
        assert end_s == pytest.approx(step.time.step.value_s)
    assert auto.timed_layers is not None
    assert whole.timed_layers is None
