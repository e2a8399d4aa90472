"""Scopes in an op_name, as the programs write them and the readers parse them."""

from typing import NamedTuple

import pytest

from meshscope.events.enums import Part, Phase
from meshscope.readers.hlo.attribution import Scope, same_name, scope_of


class Case(NamedTuple):
    op_name: str | None
    phase: Phase | None
    layers: range | None
    part: Part | None
    missing: str | None


CASES = [
    Case(
        "jit(prefill)/shard_map/prefill/layer10/mlp/psum",
        Phase.PREFILL,
        range(10, 11),
        Part.MLP,
        None,
    ),
    Case(
        "jit(decode)/shard_map/decode/layers0-63/while/body/closed_call/attn/psum",
        Phase.DECODE,
        range(64),
        Part.ATTN,
        None,
    ),
    Case(
        "jit(f)/prefill/layer3/moe.dispatch/all_to_all",
        Phase.PREFILL,
        range(3, 4),
        Part.MOE_DISPATCH,
        None,
    ),
    Case("jit(f)/decode/lm_head/all_gather", Phase.DECODE, None, Part.LM_HEAD, None),
    Case("decode.7/layer3.12/attn.2/aten__mm.1", Phase.DECODE, range(3, 4), Part.ATTN, None),
    Case("jit(f)/decode/attn/psum", Phase.DECODE, None, Part.ATTN, "layer"),
    Case("jit(f)/layer3/dot_general", None, range(3, 4), None, "phase and part"),
    Case(
        "jit(f)/decode/layers1-35by2/while/body/attn/psum",
        Phase.DECODE,
        range(1, 36, 2),
        Part.ATTN,
        None,
    ),
    Case("jit(f)/prefill/layers5-2/mlp/psum", Phase.PREFILL, None, Part.MLP, "layer"),
    Case("inputs[2][0][4]", None, None, None, "phase and part"),
    Case(None, None, None, None, "phase and part"),
]


def test_pipeline_scopes_name_stages_and_microbatches() -> None:
    scope = scope_of(
        "jit(prefill)/shard_map/prefill/while/body/closed_call/cond/branch_1_fun/stages1-2by6/"
        "microbatches2of5/while/body/closed_call/layers6-11/mlp/psum"
    )

    assert scope == Scope(
        phase=Phase.PREFILL,
        layers=range(6, 12),
        part=Part.MLP,
        stages=range(1, 3),
        stage_layers=6,
        n_microbatches=2,
        n_ticks=5,
    )
    assert (scope.n_layers, scope.n_times) == (6, 30)
    assert scope.missing is None


@pytest.mark.parametrize(
    ("path", "stages", "part"),
    [
        ("jit(f)/decode/stage0/stage/ppermute", range(1), Part.STAGE),
        ("jit(f)/decode/stages0-2/stage/ppermute", range(3), Part.STAGE),
        ("jit(f)/decode/stage3/cond/branch_1_fun/lm_head/all_gather", range(3, 4), Part.LM_HEAD),
        ("jit(f)/decode/sample/psum", None, Part.SAMPLE),
        ("jit(f)/decode/microbatches1of2/sample/psum", None, Part.SAMPLE),  # of no stage
        ("jit(f)/decode/stages3-1/lm_head/psum", None, Part.LM_HEAD),
    ],
)
def test_parts_between_layers_belong_to_stages(path: str, stages: range | None, part: Part) -> None:
    scope = scope_of(path)

    assert (scope.stages, scope.part, scope.n_times) == (stages, part, 1)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("jit(step)/decode/layer1/moe.experts/moe.router/dot_general", Part.MOE_ROUTER),
        ("jit(step)/decode/layer1/moe.experts/moe.combine/psum", Part.MOE_COMBINE),
        ("jit(step)/decode/layer1/mlp/moe.router/psum", Part.MLP),
    ],
)
def test_of_nested_parts_with_experts_the_innermost_counts(path: str, part: Part) -> None:
    assert scope_of(path).part is part


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.op_name))
def test_scope_is_read_from_the_path(case: Case) -> None:
    scope = scope_of(case.op_name)

    assert scope == Scope(phase=case.phase, layers=case.layers, part=case.part)
    assert scope.missing == case.missing


def test_names_are_equal_up_to_uniquifiers() -> None:
    assert same_name("model.26/layers.0.3/mm", "model.1/layers.0.5/mm.4")
    assert not same_name("a/psum", "b/psum")
    assert not same_name(None, None)
