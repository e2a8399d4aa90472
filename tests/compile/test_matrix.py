"""Predicted equals compiled: kind, count, shape, groups and payload of every collective."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec
import pytest
from compared import assert_predicted_equals_compiled, compiled, meanings
from made import experiment_with
from small_configs import CONFIGS, small_model
from tables import cases, stored, table

from meshscope.cost.collectives import predict
from meshscope.events.enums import Phase
from meshscope.model.config import model_from_config, read_model
from meshscope.model.model import Model
from meshscope.plans.caches import ContextForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.placement import parse_device_order
from meshscope.plans.program import Loop, Program

pytest.importorskip("libtpu", reason="the TPU compiler is the extra 'tpu'")
pytestmark = pytest.mark.tpu

TABLES: dict[str, Any] = stored(Path(__file__).with_suffix(".yaml"))
ODD_VOCABULARY = "llama-with-odd-vocabulary"
TINY_V4 = "tiny-deepseek-v4"  # one layer of each kind of attention, and a second sparse one


class Case(NamedTuple):
    model: str
    topology: str
    plan: str
    loop: Loop = Loop.SCAN
    n_layers: int | None = None
    batch: int = 8
    prompt: int = 128
    context: ContextForm = ContextForm.AUTO
    kernels: Kernels = Kernels.AUTO
    chunk: int | None = None
    dtype: str = "bf16"
    output: int = 16


# Small models compile in a tenth of the time, to collectives of the same kinds.
TELLING = cases(__file__, Case, "telling")


def every(
    models: str | list[str], topologies: str | list[str], plans: str | list[str], **facts: Any
) -> list[Case]:
    """Each model on each slice with each plan."""
    several = ([one] if isinstance(one, str) else one for one in (models, topologies, plans))
    types = get_type_hints(Case)
    facts = {name: msgspec.convert(value, types[name]) for name, value in facts.items()}
    return [Case(*names, **facts) for names in product(*several)]


WHOLE_MATRIX = [
    case
    for models, topologies, plans, *facts in TABLES["matrix"]
    for case in every(models, topologies, plans, **(facts[0] if facts else {}))
]


def quantized(
    dtype: str, model: str, topology: str, plan: str, *, n_layers: int = 2, loop: Loop = Loop.SCAN
) -> Case:
    """The first layers of a model with a format of weights, which fsdp gathers as they are stored."""
    return Case(model, topology, plan, loop, n_layers, batch=16, output=128, dtype=dtype)


FORMATS = cases(__file__, quantized, "formats")
FORMATS_OF_MATRIX = cases(__file__, quantized, "formats_of_matrix")


def experiment_for(case: Case) -> Experiment:
    sizes = {name: getattr(case, name) for name in ("batch", "prompt", "output", "n_layers")}
    sizes |= {"prefill_chunk": case.chunk, "weight_dtype": case.dtype}
    program = Program(loop=case.loop, context=case.context, kernels=case.kernels)
    return experiment_with(_model(case.model), case.plan, case.topology, program=program, **sizes)


def _model(name: str) -> Model:
    if name == TINY_V4:
        return model_from_config(CONFIGS["deepseek_v4"], name=name, source="test")
    if name == ODD_VOCABULARY:
        return model_from_config(TABLES["odd"], name=name, source="test")
    return small_model(name, 8) if name in CONFIGS else read_model(name)


@pytest.mark.parametrize("case", TELLING, ids=lambda c: "-".join(map(str, c[:4])))
def test_predicted_equals_compiled(case: Case, tmp_path: Path) -> None:
    assert_predicted_equals_compiled(experiment_for(case), tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("case", WHOLE_MATRIX, ids=lambda c: "-".join(map(str, c[:3])))
def test_predicted_equals_compiled_everywhere(case: Case, tmp_path: Path) -> None:
    assert_predicted_equals_compiled(experiment_for(case), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*FORMATS, *(pytest.param(case, marks=pytest.mark.matrix) for case in FORMATS_OF_MATRIX)],
    ids=lambda case: f"{case.dtype}-{'-'.join(case[:3])}-{case.loop}",
)
def test_quantized_weights_and_activations_compile_as_predicted(case: Case, tmp_path: Path) -> None:
    assert_predicted_equals_compiled(experiment_for(case), tmp_path)


@pytest.mark.parametrize(
    ("topology", "plan", "order"),
    [("v6e:2x4", "dp=2,tp=4", "y:tp=4,x:dp=2"), ("v5p:2x2x2", "pp=2,tp=4", "z:tp=2,y:pp=2,x:tp=2")],
)
def test_an_order_of_devices_is_that_of_the_program(topology, plan, order, tmp_path) -> None:
    experiment = experiment_for(Case("llama", topology, plan, n_layers=2))
    devices = parse_device_order(order, experiment.plan.mesh, experiment.topology)
    ordered = replace(experiment, device_order=devices)
    result = compiled(ordered, tmp_path)
    assert meanings(predict(ordered)) == meanings(result.rows)
    assert meanings(predict(ordered)) != meanings(predict(experiment))
    groups = {frozenset(group) for group in ordered.mesh.groups("tp")}
    in_rows = {frozenset(g) for row in result.rows if row.axis == "tp" for g in row.groups}
    assert in_rows == groups


@pytest.mark.matrix
@table
def test_many_row_counts_are_gathered_in_another_shape(model, plan, tmp_path) -> None:
    """libtpu gathers s32[8,512] as s32[8,4,128]: the same bytes; all other rows are equal."""
    experiment = experiment_for(Case(model, "v6e-8", plan, n_layers=1))

    predicted, of_program = (
        meanings(predict(experiment)),
        meanings(compiled(experiment, tmp_path).rows),
    )

    only_predicted, only_compiled = (
        Counter({(*key[:9], *key[10:]): n for key, n in rows.items() if key[8] == "s32"})
        for rows in (predicted, of_program)
    )
    assert only_predicted == only_compiled
    assert {key[8] for key in (predicted - of_program) + (of_program - predicted)} <= {"s32"}


def test_scanned_and_unrolled_layers_give_the_same_table(tmp_path: Path) -> None:
    results = []
    for loop in (Loop.SCAN, Loop.UNROLL):
        directory = tmp_path / loop
        directory.mkdir()
        case = Case("llama", "v6e-8", "fsdp=2,tp=4", loop, 3)
        results.append(compiled(experiment_for(case), directory))

    scanned, unrolled = (meanings(result.rows) for result in results)
    assert scanned == unrolled
    assert scanned
    noted_phases = [
        [step.time.phase for step in result.steps if any("scanned" in n for n in step.time.notes)]
        for result in results
    ]
    assert noted_phases == [[Phase.DECODE], []]
