"""Predicted equals compiled for the step that verifies drafted tokens, and for the head that drafts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from compared import assert_predicted_equals_compiled
from made import experiment_with
from small_configs import BASE, small_model
from tables import cases

import meshscope
from meshscope.events.enums import Phase, Source
from meshscope.model.mechanisms.drafts import DraftHead
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernel
from meshscope.plans.program import Loop, Partitioner, Program

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = [pytest.mark.tpu, pytest.mark.slow]


class Case(NamedTuple):
    family: str
    topology: str
    plan: str
    loop: Loop = Loop.UNROLL
    n_tokens: int = 4
    partitioner: Partitioner = Partitioner.MANUAL
    has_kernel: bool = True


def small_experiment(case: Case) -> Experiment:
    """A model of two layers, in a cache that is long enough for the decode kernel."""
    sizes = {"batch": 8, "prompt": 256, "output": 128, "decode_tokens": case.n_tokens}
    program = Program(loop=case.loop, partitioner=case.partitioner)
    model = small_model(case.family)
    return experiment_with(model, case.plan, case.topology, program=program, **sizes)


def _stored(name: str) -> list[object]:
    """The cases with this name, and those of the matrix."""
    return [
        pytest.param(case, id="-".join(map(str, case[:6])), marks=marks)
        for table, marks in ((name, ()), (f"{name}_of_matrix", pytest.mark.matrix))
        for case in cases(__file__, Case, table)
    ]


@pytest.mark.parametrize("case", _stored("verifications"))
def test_a_verification_compiles_as_predicted(case: Case, tmp_path: Path) -> None:
    """All tokens of a step in each collective, the logits of all of them, and one read of the cache."""
    experiment = small_experiment(case)
    kernel = experiment.kernels.decode_attention.kernel
    assert (kernel is Kernel.FLASH_DECODE) == case.has_kernel
    assert_predicted_equals_compiled(experiment, tmp_path, [Phase.DECODE])


@pytest.mark.parametrize("case", _stored("heads"))
def test_a_drafting_head_compiles_as_predicted(case: Case, tmp_path: Path) -> None:
    """One layer behind the matrix that joins its inputs, which fsdp gathers and tp does not split."""
    verified = small_experiment(case)
    model = verified.model
    head = replace(
        model, layers=model.layers[-1:], draft_head=DraftHead(has_norms=model.moe is not None)
    )
    workload = replace(verified.workload, decode_tokens=1)
    assert_predicted_equals_compiled(replace(verified, model=head, workload=workload), tmp_path)


def test_compile_has_both_parts_beside_their_prediction(tmp_path: Path) -> None:
    """The run shows the speculation, before and after it is saved, and its parts are runs."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**BASE, "model_type": "llama"}))
    options = {"topology": "v6e-8", "plan": "tp=8", "batch": 8, "prompt": 256, "layers": 1}
    speculate = "eagle:k=3,acceptance=0.7"
    run = meshscope.compile(config, **options, speculate=speculate, out=tmp_path / "run")
    opened = meshscope.open(tmp_path / "run")[0]

    assert opened.speculation.steps == run.speculation.steps
    assert run.speculation.steps.keys() == {Source.PREDICTED, Source.COMPILED}
    assert run.speculation.step.source is Source.COMPILED
    assert "verify collectives: predicted = compiled" in run.text(full=True)
    assert "draft collectives: predicted = compiled" in run.text(full=True)
    entry = run.as_dict()["speculation"]
    assert entry["sources"].keys() == {"predicted", "compiled"}
    for name, part in entry["runs"].items():
        assert (tmp_path / "run" / "speculation" / name / "hlo" / "decode.hlo.txt.gz").exists()
        assert part["collectives_agree"] is True
        assert part["memory"].keys() == {"predicted", "compiled"}
