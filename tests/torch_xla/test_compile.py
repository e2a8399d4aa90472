"""What torch_xla traced is compiled for TPU: every collective has phase, layer, part and axis.

This process compiles, as importing torch_xla takes longer than most programs; cases of every day use workers, as
`compile` does.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made import experiment_with
from tables import stored

pytest.importorskip("torch_xla.core", reason="the extra 'torchxla' has an environment of its own")

from meshscope.analysis.join import Verdict, compare
from meshscope.backends.compile.compile import compile_experiment
from meshscope.backends.compile.read import read_chunks
from meshscope.backends.compile.worker import compile_program, set_environment
from meshscope.cost.collectives import predict
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase
from meshscope.model.config import model_from_config
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Frontend, Program
from meshscope.programs.torchxla.configs import check_traceable

pytestmark = pytest.mark.filterwarnings("ignore:.*XLA_USE_SPMD is being deprecated")

TABLES: dict[str, Any] = stored(Path(__file__).with_suffix(".yaml"))
FAMILIES: dict[str, dict[str, object]] = TABLES["families"]
CONFIGS = FAMILIES | TABLES["others"]
# Together they have every axis; mixtures also place experts.
PLANS = {"pp=2,fsdp=2,tp=2,sp": ",ep=2", "dp=2,cp=2,tp=2": ",ep=4"}
MORE_PLANS = (  # of a pipeline: with cp, and with experts over tp and the data axis
    ("deepseek_v3", "pp=2,cp=2,tp=2"),
    ("glm4_moe", "pp=2,dp=2,tp=2,sp,ep=4"),
    ("gpt_oss", "pp=2,dp=2,tp=2,ep=4"),
)
ENDS = {Part.EMBED, Part.LM_HEAD, Part.SAMPLE}
DAILY = {"sp"}


def small_experiment(config: str, plan: str, dtype: str = "bf16") -> Experiment:
    model = model_from_config(CONFIGS[config], name="small", source="test")
    program = Program(frontend=Frontend.TORCHXLA)
    sizes = {"batch": 8, "prompt": 128, "output": 8, "weight_dtype": dtype}
    return experiment_with(model, plan, "v6e-8", program=program, **sizes)


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """The environment of a worker, which libtpu reads when it is loaded."""
    before = dict(os.environ)
    set_environment()
    yield
    os.environ.clear()
    os.environ.update(before)


def compiled(experiment: Experiment, folder: Path) -> list[Collective]:
    """The collectives of both phases, compiled by this process."""
    check_traceable(experiment)
    rows: list[Collective] = []
    for phase in experiment.phases:
        compile_program(experiment, phase, -1, folder)
        rows += read_chunks(experiment, phase, folder).rows
    return rows


@pytest.mark.parametrize(
    ("name", "config", "plan", "collectives"),
    [
        pytest.param(*case, id=case[0], marks=() if case[0] in DAILY else (pytest.mark.matrix,))
        for case in TABLES["cases"]
    ],
)
@pytest.mark.usefixtures("environment")
def test_every_collective_is_attributed(name, config, plan, collectives, tmp_path) -> None:
    """Nothing is unattributed; what programs write themselves is as predicted in prefill."""
    experiment = small_experiment(config, plan)

    if name in DAILY:
        rows = compile_experiment(experiment, tmp_path, progress=lambda *_: None).rows
    else:
        rows = compiled(experiment, tmp_path)

    assert not {row.axis_reason for row in rows if row.axis_reason}
    comparison = compare(predict(experiment), rows)
    equal = {
        (match.shown.part, match.shown.kind)
        for match in comparison.with_verdict(Verdict.EQUAL, Phase.PREFILL)
    }
    expected = {(Part(part), Kind(kind)) for part, kind in map(str.split, collectives)}
    assert expected <= equal, [str(m) for m in comparison.matches]
    # Beside the collectives over cp, only sums of its output are exchanged.
    if name.startswith("entries"):
        differing = {Verdict.EXTRA, Verdict.MISSING, Verdict.CHANGED}
        assert not [
            m for m in comparison.matches if m.verdict in differing and m.shown.part is Part.ATTN
        ]
    if experiment.plan.pp > 1 and not experiment.plan.sp:  # idle stages send nothing
        of_layers = [m for m in comparison.matches if m.shown.part in {Part.ATTN, Part.MLP}]
        assert all(m.verdict is Verdict.EQUAL for m in of_layers), [str(m) for m in of_layers]
    if name == "ep":  # slots for experts are predicted, in decode at least one each
        in_decode = comparison.with_verdict(Verdict.EQUAL, Phase.DECODE)
        assert expected <= {(match.shown.part, match.shown.kind) for match in in_decode}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        *(
            (family, plan + experts * ("experts" in " ".join(config)))
            for family, config in FAMILIES.items()
            for plan, experts in PLANS.items()
        ),
        *MORE_PLANS,
    ],
)
@pytest.mark.usefixtures("environment")
def test_layers_and_stages_are_as_predicted(family: str, plan: str, tmp_path: Path) -> None:
    """Every collective of layers, of stages and of the program; docs/evidence/torchxla.md has what the partitioner adds."""
    experiment = small_experiment(family, plan)
    rows = compiled(experiment, tmp_path)
    assert not {row.axis_reason for row in rows if row.axis_reason}
    matches = compare(predict(experiment), rows).matches
    differing = [match for match in matches if match.verdict is not Verdict.EQUAL]
    assert [str(m) for m in differing if m.shown.part not in ENDS] == []
    extra = [m.shown for m in differing if m.verdict is Verdict.EXTRA]
    assert not [row for row in extra if row.inserted_by == "program"]


@pytest.mark.parametrize(
    ("config", "plan", "dtype", "differing"),
    [
        pytest.param(*row, marks=pytest.mark.matrix if row[2] == "bf16" else ())
        for row in TABLES["remaining"]
    ],
)
@pytest.mark.usefixtures("environment")
def test_what_is_not_predicted_is_listed(config, plan, dtype, differing, tmp_path) -> None:
    """A line that is gone is predicted now: take it out of the list and of docs/evidence/accuracy.md."""
    experiment = small_experiment(config, plan, dtype)
    if dtype == "bf16":
        rows = compiled(experiment, tmp_path)
    else:  # runs every day
        rows = compile_experiment(experiment, tmp_path, progress=lambda *_: None).rows
    matches = compare(predict(experiment), rows).matches
    shown = {(m.verdict, m.shown) for m in matches if m.verdict is not Verdict.EQUAL}
    of_row = [f"{v} {r.phase} {r.part} {r.kind} {r.axis}" for v, r in shown]
    assert sorted(set(of_row)) == differing
