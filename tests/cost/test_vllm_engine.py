"""vLLM's conventions beyond the paper's tables: uneven stages, batches, boundaries, refusals."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshscope.cost.collectives import predict
from meshscope.errors import PlanError
from meshscope.events.enums import REQUEST_PHASES, Kind, Part, Phase
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Engine

Make = Callable[..., Experiment]


def test_each_stage_receives_what_the_previous_one_sends(make: Make) -> None:
    rows = predict(make("Llama-3.1-8B", "pp=4,tp=2", engine=Engine.VLLM))
    for phase in REQUEST_PHASES:
        sent, received = (
            {r.stage: r for r in rows if r.kind is kind and r.phase is phase}
            for kind in (Kind.SEND, Kind.RECV)
        )
        assert [sent[i].groups for i in range(3)] == [
            ((0, 2), (1, 3)),
            ((2, 4), (3, 5)),
            ((4, 6), (5, 7)),
        ]
        assert set(received) == {1, 2, 3}
        for stage, row in sent.items():
            partner = replace(row, kind=Kind.RECV, stage=stage + 1, wire_bytes=0)
            assert received[stage + 1] == partner


def test_groups_of_a_stage_are_its_workers(make: Make) -> None:
    experiment = make("Llama-3.1-8B", "pp=2,tp=2", engine=Engine.VLLM)
    groups = {(r.stage, r.groups) for r in predict(experiment) if r.axis == "tp"}
    assert groups == {(0, ((0, 1),)), (1, ((2, 3),))}


def test_layers_are_rows_of_their_stage(make: Make) -> None:
    rows = predict(make("Llama-3.2-3B", "pp=3,tp=2", engine=Engine.VLLM))
    layers = {
        stage: sorted({r.layer for r in rows if r.stage == stage and r.layer is not None})
        for stage in range(3)
    }
    assert layers == {0: [*range(9)], 1: [*range(9, 19)], 2: [*range(19, 28)]}


@pytest.mark.parametrize(
    ("plan", "n_rows", "axes", "stages"),
    [("tp=1", 0, set(), set()), ("pp=4", 12, {"pp"}, {0, 1, 2, 3}), ("tp=4", 132, {"tp"}, {None})],
)
def test_an_axis_of_size_one_costs_nothing(plan, n_rows, axes, stages, make) -> None:
    rows = predict(make("Llama-3.1-8B", plan, engine=Engine.VLLM))
    assert len(rows) == n_rows
    assert {r.axis for r in rows} == axes
    assert {r.stage for r in rows} == stages


def test_tokens_of_a_batch_share_one_dimension(make: Make, small: Model) -> None:
    rows = predict(make(small, "pp=2,tp=2", engine=Engine.VLLM, batch=3, prompt=5, output=2))
    shapes = {(r.phase, r.kind, r.shape) for r in rows}
    assert shapes == {
        (Phase.PREFILL, Kind.ALL_REDUCE, (15, 64)),
        (Phase.PREFILL, Kind.ALL_GATHER, (15, 64)),
        (Phase.PREFILL, Kind.SEND, (15, 32)),
        (Phase.PREFILL, Kind.RECV, (15, 32)),
        (Phase.PREFILL, Kind.GATHER, (3, 64)),  # of 101 rows, padded to 128
        (Phase.DECODE, Kind.ALL_REDUCE, (3, 64)),
        (Phase.DECODE, Kind.ALL_GATHER, (3, 64)),
        (Phase.DECODE, Kind.SEND, (3, 32)),
        (Phase.DECODE, Kind.RECV, (3, 32)),
        (Phase.DECODE, Kind.GATHER, (3, 64)),
    }


def test_rows_name_their_part_of_the_model(make: Make) -> None:
    rows = predict(make("Llama-3.1-8B", "pp=2,tp=2", engine=Engine.VLLM))
    parts = {(r.part, r.kind) for r in rows}
    assert parts == {
        (Part.EMBED, Kind.ALL_REDUCE),
        (Part.ATTN, Kind.ALL_REDUCE),
        (Part.MLP, Kind.ALL_REDUCE),
        (Part.STAGE, Kind.SEND),
        (Part.STAGE, Kind.RECV),
        (Part.STAGE, Kind.ALL_GATHER),
        (Part.LM_HEAD, Kind.GATHER),
    }


@pytest.fixture
def three_heads(small: Model) -> Model:
    """The small model with heads that tp=3 divides."""
    return replace(small, attention=replace(small.attention, n_heads=6, n_kv_heads=3))


def test_a_vocabulary_that_vllm_cannot_split_is_refused(make: Make, three_heads: Model) -> None:
    with pytest.raises(PlanError, match=r"tp=3 does not divide 128, .* of small .*Use a tp"):
        predict(make(three_heads, "tp=3", engine=Engine.VLLM))


def test_embeddings_of_each_layer_are_refused(make: Make) -> None:
    """Their table would be missing in the bytes of a worker."""
    with pytest.raises(
        PlanError, match=r"vLLM 0\.8\.5, which has no models with embeddings of each"
    ):
        predict(make("google/gemma-4-E2B-it", "tp=4", engine=Engine.VLLM))


def test_a_boundary_that_tp_does_not_divide_is_refused(make: Make, three_heads: Model) -> None:
    model = replace(three_heads, vocab=192)
    assert predict(make(model, "tp=3", engine=Engine.VLLM))
    with pytest.raises(PlanError, match=r"tp=3 does not divide hidden=64 of small, .*Use a tp"):
        predict(make(model, "pp=2,tp=3", engine=Engine.VLLM))
