"""Scopes in an op_name, as the programs write them and the readers parse them."""

import pytest
from tables import table

from meshscope.events.enums import Part, Phase
from meshscope.readers.hlo.attribution import Scope, same_name, scope_of

DECODE, PREFILL, NO_PHASE = Phase.DECODE, Phase.PREFILL, "phase and part"
SCANNED = "jit(f)/decode/{}/while/body/attn/psum"
CASES = [
    ("jit(f)/shard_map/prefill/layer10/mlp/psum", PREFILL, range(10, 11), Part.MLP, None),
    (SCANNED.format("layers0-63"), DECODE, range(64), Part.ATTN, None),
    (SCANNED.format("layers1-35by2"), DECODE, range(1, 36, 2), Part.ATTN, None),
    ("jit(f)/prefill/layer3/moe.dispatch/a2a", PREFILL, range(3, 4), Part.MOE_DISPATCH, None),
    ("jit(f)/decode/lm_head/all_gather", DECODE, None, Part.LM_HEAD, None),
    ("decode.7/layer3.12/attn.2/aten__mm.1", DECODE, range(3, 4), Part.ATTN, None),
    ("jit(f)/decode/attn/psum", DECODE, None, Part.ATTN, "layer"),
    ("jit(f)/layer3/dot_general", None, range(3, 4), None, NO_PHASE),
    ("jit(f)/prefill/layers5-2/mlp/psum", PREFILL, None, Part.MLP, "layer"),
    ("inputs[2][0][4]", None, None, None, NO_PHASE),
    (None, None, None, None, NO_PHASE),
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


@table
def test_of_nested_parts_with_experts_the_innermost_counts(path: str, part: Part) -> None:
    assert scope_of(path).part is part


@pytest.mark.parametrize(("op_name", "phase", "layers", "part", "missing"), CASES)
def test_scope_is_read_from_the_path(op_name, phase, layers, part, missing) -> None:
    scope = scope_of(op_name)
    assert scope == Scope(phase=phase, layers=layers, part=part)
    assert scope.missing == missing


def test_names_are_equal_up_to_uniquifiers() -> None:
    assert same_name("model.26/layers.0.3/mm", "model.1/layers.0.5/mm.4")
    assert not same_name("a/psum", "b/psum")
    assert not same_name(None, None)
