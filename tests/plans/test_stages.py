"""Layers of pipeline stages: each exactly once, with unused slots marked."""

import pytest
from tables import table

from meshscope.model.config import read_model
from meshscope.model.layers import AttentionKind, Layer, MlpKind
from meshscope.plans.stages import (
    StageRun,
    StageSends,
    caches_before,
    default_microbatches,
    n_ticks,
    shared_slot,
    stage_layers,
    stage_runs,
    stage_sends,
    stage_slots,
    stored_layers,
)

DENSE, MOE = Layer(), Layer(mlp=MlpKind.MOE)
SLIDING = Layer(attention=AttentionKind.SLIDING)
DEEPSEEK_V3 = (DENSE,) * 3 + (MOE,) * 58

MODELS = [
    (DENSE,) * 7,
    DEEPSEEK_V3,
    (DENSE,) + (MOE,) * 26,
    (SLIDING, DENSE) * 6,
    read_model("openai/gpt-oss-120b").layers,
]


@table
def test_layers_are_split_as_in_vllm(n_layers: int, sizes: list[int]) -> None:
    assert [len(layers) for layers in stage_layers(n_layers, len(sizes))] == sizes


@pytest.mark.parametrize("n_layers", range(1, 20))
def test_every_layer_is_in_one_stage_and_the_last_is_never_larger(n_layers: int) -> None:
    for n_stages in range(1, n_layers + 1):
        stages = stage_layers(n_layers, n_stages)
        assert [layer for stage in stages for layer in stage] == list(range(n_layers))
        assert len(stages[-1]) == n_layers // n_stages
        assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_stages_send_what_layers_of_later_stages_read() -> None:
    """Gemma 4 E2B: every fifth layer is full; those from 15 on share the caches of layers 13 and 14."""
    e2b = read_model("google/gemma-4-E2B-it")
    sources = (e2b.layers[13], e2b.layers[14])
    assert stage_sends(e2b, 1) == StageSends()
    assert stage_sends(e2b, 2) == StageSends(n_inputs=35 - 18, caches=sources)
    assert stage_sends(e2b, 4) == StageSends(n_inputs=35 - 9, caches=sources)
    received = [caches_before(e2b, first) for first in (13, 14, 15, 30)]
    assert received == [(), sources[:1], sources, sources]
    slots = [[shared_slot(e2b, kind, n_stages) for kind in sources] for n_stages in (1, 2, 4)]
    assert slots == [[11, 2], [11, 2], [3, 1]]  # the second of four stages begins with layer 9


def test_stages_send_the_choice_of_an_indexer_if_a_stage_begins_without_one() -> None:
    """GLM-5.2 has an indexer in layers 0, 1, 2, 6, 10, ..."""
    glm = read_model("zai-org/GLM-5.2")
    assert stage_sends(glm, 2) == StageSends(has_choice=True)  # layer 39
    assert stage_sends(glm.first(12), 2) == StageSends()  # layer 6
    assert stage_sends(read_model("zai-org/GLM-5"), 2) == StageSends()


def test_stages_with_the_same_kinds_of_layers_share_a_program() -> None:
    assert stage_runs(DEEPSEEK_V3, 2) == (
        StageRun(stages=range(1), first_layer=0, kinds=DEEPSEEK_V3[:31]),
        StageRun(stages=range(1, 2), first_layer=31, kinds=(MOE,) * 30),
    )
    assert stage_runs((DENSE,) * 64, 4) == (
        StageRun(stages=range(4), first_layer=0, kinds=(DENSE,) * 16),
    )
    assert [(run.stages, len(run.kinds)) for run in stage_runs((DENSE,) * 22, 4)] == [
        (range(1), 5),
        (range(1, 3), 6),
        (range(3, 4), 5),
    ]


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("layers", MODELS, ids=lambda layers: f"{len(layers)}")
def test_each_layer_is_run_and_stored_once(layers: tuple[Layer, ...], n_stages: int) -> None:
    of_stage = stage_layers(len(layers), n_stages)
    run: list[Layer] = []
    for shared in stage_runs(layers, n_stages):
        assert shared.first_layer == of_stage[shared.stages[0]].start
        run += shared.kinds * len(shared.stages)
    assert tuple(run) == layers
    for kind in set(layers):
        slots = stage_slots(layers, kind, n_stages)
        stored = [index for index in slots if index is not None]
        assert stored == [index for index, layer in enumerate(layers) if layer == kind]
        n_each = len(slots) // n_stages
        for stage, indices in enumerate(of_stage):
            held = slots[stage * n_each : (stage + 1) * n_each]
            assert {index for index in held if index is not None} <= set(indices)


def test_a_stage_allocates_the_largest_number_of_layers_of_each_kind() -> None:
    model = read_model("deepseek-ai/DeepSeek-V3")
    assert model.layers == DEEPSEEK_V3
    assert stored_layers(model, 2) == {DENSE: 3, MOE: 30}
    assert stage_slots(DEEPSEEK_V3, DENSE, 2) == (0, 1, 2, None, None, None)
    assert stored_layers(model, 1) == {DENSE: 3, MOE: 58}


@table
def test_default_microbatches_are_the_largest_divisor_up_to_the_stages(
    local_batch, n_stages, expected
) -> None:
    assert default_microbatches(local_batch, n_stages) == expected


def test_ticks_of_a_pipeline() -> None:
    assert [n_ticks(n, 4) for n in (1, 4, 8)] == [4, 7, 11]
