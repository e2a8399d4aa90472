"""Explicit programs issue the predicted collectives, by their traced jaxprs."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from made import experiment_with
from tables import cases

from meshscope.cost.collectives import predict
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Phase
from meshscope.model.config import model_from_config
from meshscope.plans.caches import ContextForm
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program
from meshscope.programs.jax.build import build_program
from meshscope.readers.hlo.attribution import scope_of

KIND_OF_PRIMITIVE = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "ppermute": "permute",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}
MUTE = {"axis_index"}  # names an axis without communication
CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "traced_configs.json").read_text()
)["collectives"]
PLANS = (
    *("tp=1", "tp=8", "tp=8,sp", "dp=8", "dp=2,tp=4,sp", "fsdp=8", "fsdp=2,tp=4"),
    *("fsdp=2,tp=4,sp", "cp=8", "cp=2,tp=4", "fsdp=2,cp=2,tp=2,sp"),
)
EXPERT_PLANS = ("tp=8,ep=8", "dp=8,ep=8", "dp=2,tp=4,ep=8", "dp=2,tp=4,sp,ep=8", "fsdp=2,tp=4,ep=2")
CASES = [("qwen2", plan) for plan in PLANS]
CASES += [("deepseek_v4", p) for p in (*PLANS, *EXPERT_PLANS) if p not in {"cp=8", "cp=2,tp=4"}]
CASES += [
    ("glm_moe_dsa", p) for p in ("tp=8,sp", "fsdp=2,tp=4", "fsdp=2,cp=2,tp=2,sp", *EXPERT_PLANS)
]


def meeting(equation: Any) -> tuple[str, str, tuple[int, ...]]:
    """Kind, axis and payload shape of a collective."""
    kind = KIND_OF_PRIMITIVE[equation.primitive.name]
    axes = equation.params.get("axes") or equation.params["axis_name"]
    payload = equation.outvars[0] if kind == "all_gather" else equation.invars[0]
    axis = axes if isinstance(axes, str) else "+".join(axes)
    return kind, axis, tuple(payload.aval.shape)


def is_collective(equation: Any) -> bool:
    """Whether an equation names a mesh axis; an unknown one that does fails the test."""
    names_axis = "axis_name" in equation.params or "axes" in equation.params
    if names_axis and equation.primitive.name in KIND_OF_PRIMITIVE:
        return True
    if "axis_name" in equation.params and equation.primitive.name not in MUTE:
        raise AssertionError(f"unknown collective {equation.primitive.name}")
    return False


@pytest.mark.parametrize("phase", REQUEST_PHASES)
@pytest.mark.parametrize("batch", [8, pytest.param(16, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("config", "plan_text"), CASES)
def test_the_traced_program_issues_the_predicted_collectives(
    config, plan_text, batch, phase
) -> None:
    assert_traced_is_predicted(config, plan_text, phase, batch=batch)


@pytest.mark.parametrize("phase", REQUEST_PHASES)
@pytest.mark.parametrize("form", ContextForm)
@pytest.mark.parametrize("plan_text", ["cp=8", "cp=2,tp=4,sp", "fsdp=2,cp=2,tp=2"])
@pytest.mark.parametrize("config", ["qwen2", "deepseek_v32"])
def test_the_traced_program_communicates_over_cp_as_predicted(
    config, plan_text, form, phase
) -> None:
    assert_traced_is_predicted(config, plan_text, phase, form=form)


@pytest.mark.matrix
@pytest.mark.parametrize("phase", REQUEST_PHASES)
@pytest.mark.parametrize("plan_text", ["cp=8", "cp=4,tp=2", "cp=2,tp=4"])
@pytest.mark.parametrize("prompt", [32, 64])
def test_compressed_entries_are_gathered_as_predicted(prompt, plan_text, phase) -> None:
    """Blocks are whole windows of both rates (4 and 8), or of the lower rate only."""
    assert_traced_is_predicted("deepseek_v4", plan_text, phase, prompt=prompt)


@pytest.mark.parametrize(("plan_text", "prompt"), [("fsdp=8", 3), ("fsdp=2,cp=2", 2)])
def test_a_prompt_shorter_than_an_entry_gathers_no_indexer_queries(plan_text, prompt) -> None:
    """DeepSeek-V4, whose lowest rate is 4."""
    assert_traced_is_predicted("deepseek_v4", plan_text, Phase.PREFILL, prompt=prompt)


def assert_traced_is_predicted(
    config: str, plan_text: str, phase: Phase, *, form: ContextForm | None = None, **sizes: int
) -> None:
    program = Program(loop=Loop.UNROLL, **({} if form is None else {"context": form}))
    rows, asked = traced(config, plan_text, phase, program, **sizes)
    predicted: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        predicted[row.kind.value, row.axis, row.shape] += row.count
    assert Counter(meeting(equation) for equation, *_ in asked) == predicted


class Pipeline(NamedTuple):
    config: str
    plan: str
    microbatches: int | None = None


PIPELINES = [
    *cases(__file__, Pipeline, "pipelines"),
    *(
        pytest.param(*case, marks=pytest.mark.matrix)
        for case in cases(__file__, Pipeline, "pipelines_of_matrix")
    ),
]


def executed(jaxpr: Any, times: int = 1, path: str = "") -> Iterator[tuple[Any, int, str]]:
    """Every collective of a traced program and its inner programs, with its executions and scopes."""
    for equation in jaxpr.eqns:
        here = f"{path}/{equation.source_info.name_stack}"
        if is_collective(equation):
            yield equation, times, here
        inner_times = times * equation.params.get("length", 1)
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner_jaxpr = getattr(inner, "jaxpr", inner)
                if hasattr(inner_jaxpr, "eqns"):
                    yield from executed(inner_jaxpr, inner_times, here)


def traced(
    config: str, plan_text: str, phase: Phase, program: Program, *, batch: int = 8, prompt: int = 32
) -> tuple[list[Collective], list[tuple[Any, int, str]]]:
    """The predicted collectives of a phase, and those of the traced program."""
    model, n_devices = (
        model_from_config(CONFIGS[config], name="tiny", source="test"),
        parse_plan(plan_text).n_devices,
    )
    options = {"batch": batch, "prompt": prompt, "output": 4, "program": program}
    experiment = experiment_with(model, plan_text, f"cpu:{n_devices}", **options)
    built = build_program(experiment, phase, jax.devices()[:n_devices])
    rows = [row for row in predict(experiment) if row.phase is phase]
    return rows, list(executed(built.step.trace(*built.arguments).jaxpr.jaxpr))


@pytest.mark.parametrize("loop", [Loop.UNROLL, Loop.SCAN])
@pytest.mark.parametrize("phase", REQUEST_PHASES)
@pytest.mark.parametrize(("config", "plan_text", "microbatches"), PIPELINES)
def test_each_stage_issues_the_predicted_collectives(
    config, plan_text, microbatches, phase, loop
) -> None:
    """By stage and layer, for three layers on two stages or on three."""
    program = Program(loop=loop, microbatches=microbatches, context=ContextForm.ALLGATHER)
    rows, asked = traced(config, plan_text, phase, program)
    predicted: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        place = (row.stage, row.layer, row.part)
        predicted[*place, row.kind.value, row.axis, row.shape] += row.count
    in_program: Counter[tuple[object, ...]] = Counter()
    for equation, times, path in asked:
        scope = scope_of(path)
        count = times * scope.n_microbatches // scope.n_times
        for number, stage in enumerate(scope.stages or [None]):
            for layer in scope.layers or [None]:
                at = None if layer is None else layer + number * scope.stage_layers
                in_program[stage, at, scope.part, *meeting(equation)] += count
    assert in_program == predicted
