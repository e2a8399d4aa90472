"""Explicit programs issue the predicted collectives, by their traced jaxprs."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from meshscope.cost.collectives import predict
from meshscope.events.enums import REQUEST_PHASES, Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import model_from_config
from meshscope.plans.caches import ContextForm
from meshscope.plans.experiment import experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Program
from meshscope.plans.workload import Workload
from meshscope.readers.hlo.attribution import scope_of

jax = pytest.importorskip("jax", reason="the programs need JAX")

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
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 101,
    },
    "deepseek_v4": {
        "model_type": "deepseek_v4",
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 8,
        "o_lora_rank": 4,
        "sliding_window": 6,
        "compress_ratios": [0, 4, 128, 4],
        "compress_rate_hca": 8,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 2,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "num_hash_layers": 2,
        "hc_mult": 3,
        "vocab_size": 101,
    },
}
CONFIG = CONFIGS["qwen2"]
MIXTURE = CONFIG | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
PLANS = (
    "tp=1",
    "tp=8",
    "tp=8,sp",
    "dp=8",
    "dp=2,tp=4,sp",
    "fsdp=8",
    "fsdp=2,tp=4",
    "fsdp=2,tp=4,sp",
    "cp=8",
    "cp=2,tp=4",
    "fsdp=2,cp=2,tp=2,sp",
)
LATENT_CONFIG = {
    "model_type": "deepseek_v32",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "vocab_size": 101,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 5,
}
EXPERT_PLANS = ("tp=8,ep=8", "dp=8,ep=8", "dp=2,tp=4,ep=8", "dp=2,tp=4,sp,ep=8", "fsdp=2,tp=4,ep=2")
CONFIGS["glm_moe_dsa"] = LATENT_CONFIG | {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}
CASES = [("qwen2", plan) for plan in PLANS]
CASES += [("deepseek_v4", p) for p in (*PLANS, *EXPERT_PLANS) if p not in {"cp=8", "cp=2,tp=4"}]
CASES += [
    ("glm_moe_dsa", p) for p in ("tp=8,sp", "fsdp=2,tp=4", "fsdp=2,cp=2,tp=2,sp", *EXPERT_PLANS)
]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a traced program, including inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from equations(inner)


def asked_for(jaxpr: Any) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """Kind, axis and payload shape of every collective of a traced program."""
    return Counter(map(meeting, filter(is_collective, equations(jaxpr))))


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
    config: str, plan_text: str, batch: int, phase: Phase
) -> None:
    program = Program(loop=Loop.UNROLL)
    assert_traced_is_predicted(CONFIGS[config], plan_text, program, batch, phase)


@pytest.mark.parametrize("phase", REQUEST_PHASES)
@pytest.mark.parametrize("form", ContextForm)
@pytest.mark.parametrize("plan_text", ["cp=8", "cp=2,tp=4,sp", "fsdp=2,cp=2,tp=2"])
@pytest.mark.parametrize("config", [CONFIG, LATENT_CONFIG], ids=lambda c: c["model_type"])
def test_the_traced_program_communicates_over_cp_as_predicted(
    config: dict[str, Any], plan_text: str, form: ContextForm, phase: Phase
) -> None:
    program = Program(loop=Loop.UNROLL, context=form)
    assert_traced_is_predicted(config, plan_text, program, 8, phase)


@pytest.mark.matrix
@pytest.mark.parametrize("phase", REQUEST_PHASES)
@pytest.mark.parametrize("plan_text", ["cp=8", "cp=4,tp=2", "cp=2,tp=4"])
@pytest.mark.parametrize("prompt", [32, 64])
def test_compressed_entries_are_gathered_as_predicted(
    prompt: int, plan_text: str, phase: Phase
) -> None:
    """Blocks are whole windows of both rates (4 and 8), or of the lower rate only."""
    program = Program(loop=Loop.UNROLL)
    config = CONFIGS["deepseek_v4"]
    assert_traced_is_predicted(config, plan_text, program, 8, phase, prompt=prompt)


@pytest.mark.parametrize(("plan_text", "prompt"), [("fsdp=8", 3), ("fsdp=2,cp=2", 2)])
def test_a_prompt_shorter_than_an_entry_gathers_no_indexer_queries(
    plan_text: str, prompt: int
) -> None:
    """DeepSeek-V4, whose lowest rate is 4."""
    program, config = Program(loop=Loop.UNROLL), CONFIGS["deepseek_v4"]
    assert_traced_is_predicted(config, plan_text, program, 8, Phase.PREFILL, prompt=prompt)


def assert_traced_is_predicted(
    config: dict[str, Any],
    plan_text: str,
    asked: Program,
    batch: int,
    phase: Phase,
    *,
    prompt: int = 32,
) -> None:
    from meshscope.programs.jax.build import build_program  # noqa: PLC0415  imports JAX

    plan = parse_plan(plan_text)
    experiment = experiment_of(
        model=model_from_config(config, name="tiny", source="test"),
        plan=plan,
        topology=parse_topology(f"cpu:{plan.n_devices}"),
        workload=Workload(batch=batch, prompt=prompt, output=4),
        program=asked,
    )
    program = build_program(experiment, phase, jax.devices()[: plan.n_devices])
    predicted: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for row in predict(experiment):
        if row.phase is phase:
            assert row.axis is not None
            assert row.shape is not None
            predicted[(row.kind.value, row.axis, row.shape)] += row.count

    traced = program.step.trace(*program.arguments)

    assert asked_for(traced.jaxpr.jaxpr) == predicted


PIPELINES = (
    (CONFIG, "pp=2", None),
    (CONFIG, "pp=3,tp=2", None),
    (CONFIG, "pp=2,tp=4", 4),
    (CONFIG, "pp=2,dp=2,tp=2,sp", 2),
    (CONFIG, "pp=2,fsdp=2,tp=2", None),
    (CONFIG, "pp=2,fsdp=2,tp=2,sp", 1),
    (CONFIG, "pp=2,cp=2,tp=2,sp", None),
    (MIXTURE, "pp=2,dp=2,tp=2,ep=4", 2),
    (MIXTURE, "pp=3,fsdp=2,ep=2", None),
    (CONFIGS["glm_moe_dsa"], "pp=2,dp=2,tp=2,ep=4,sp", 4),
    (CONFIGS["deepseek_v4"], "pp=2,cp=2,tp=2,sp", None),
    *(
        pytest.param(CONFIGS["deepseek_v4"], *case, marks=pytest.mark.matrix)
        for case in (("pp=2,tp=2", None), ("pp=3,fsdp=2", None), ("pp=2,dp=2,tp=2,ep=4,sp", 4))
    ),
)


def executed(jaxpr: Any, times: int = 1, path: str = "") -> Iterator[tuple[Any, int, str]]:
    """Every equation that names a mesh axis, with its executions and scopes."""
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


@pytest.mark.parametrize("loop", [Loop.UNROLL, Loop.SCAN])
@pytest.mark.parametrize("phase", REQUEST_PHASES)
@pytest.mark.parametrize(("config", "plan_text", "microbatches"), PIPELINES)
def test_each_stage_issues_the_predicted_collectives(
    config: dict[str, Any], plan_text: str, microbatches: int | None, phase: Phase, loop: Loop
) -> None:
    """By stage and layer, for three layers on two stages or on three."""
    from meshscope.programs.jax.build import build_program  # noqa: PLC0415  imports JAX

    plan = parse_plan(plan_text)
    experiment = experiment_of(
        model=model_from_config(config, name="tiny", source="test"),
        plan=plan,
        topology=parse_topology(f"cpu:{plan.n_devices}"),
        workload=Workload(batch=8, prompt=32, output=4),
        program=Program(loop=loop, microbatches=microbatches, context=ContextForm.ALLGATHER),
    )
    program = build_program(experiment, phase, jax.devices()[: plan.n_devices])
    predicted: Counter[tuple[object, ...]] = Counter()
    for row in predict(experiment):
        if row.phase is phase:
            place = (row.stage, row.layer, row.part)
            predicted[(*place, row.kind.value, row.axis, row.shape)] += row.count

    traced: Counter[tuple[object, ...]] = Counter()
    for equation, times, path in executed(program.step.trace(*program.arguments).jaxpr.jaxpr):
        scope = scope_of(path)
        count = times * scope.n_microbatches // scope.n_times
        for number, stage in enumerate(scope.stages or [None]):
            for layer in scope.layers or [None]:
                at = None if layer is None else layer + number * scope.stage_layers
                traced[(stage, at, scope.part, *meeting(equation))] += count

    assert traced == predicted
