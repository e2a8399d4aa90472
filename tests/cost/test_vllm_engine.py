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


def test_groups_and_layers_are_rows_of_their_stage(make: Make) -> None:
    """"""
    rows = predict(make("Llama-3.2-3B", "pp=3,tp=2", engine=Engine.VLLM))
    groups = {(r.stage, r.groups) for r in rows if r.axis == "tp"}
    assert groups == {(n, ((2 * n, 2 * n + 1),)) for n in range(3)}
    layers = {(r.layer, r.stage) for r in rows if r.layer is not None}
    assert layers == {(n, (n > 8) + (n > 18)) for n in range(28)}
    rows = predict(make("Llama-3.1-8B", "pp=4,tp=2", engine=Engine.VLLM))
    for phase in REQUEST_PHASES:
        sent, received = (
            {r.stage: r for r in rows if r.kind is kind and r.phase is phase}
            for kind in (Kind.SEND, Kind.RECV)
        )
        pairs = {n: ((2 * n, 2 * n + 2), (2 * n + 1, 2 * n + 3)) for n in range(3)}
        assert {stage: row.groups for stage, row in sent.items()} == pairs
        assert received == {
            n + 1: replace(row, kind=Kind.RECV, stage=n + 1, wire_bytes=0)
            for n, row in sent.items()
        }


@pytest.mark.parametrize(
    ("plan", "n_rows", "axes", "stages"),
    [("tp=1", 0, set(), set()), ("pp=4", 12, {"pp"}, {0, 1, 2, 3}), ("tp=4", 132, {"tp"}, {None})],
)
def test_an_axis_of_size_one_costs_nothing(plan, n_rows, axes, stages, make) -> None:
    rows = predict(make("Llama-3.1-8B", plan, engine=Engine.VLLM))
    assert (len(rows), {r.axis for r in rows}, {r.stage for r in rows}) == (n_rows, axes, stages)


def test_tokens_of_a_batch_share_one_dimension(make: Make, small: Model) -> None:
    """And rows name their part of the model."""
    rows = predict(make(small, "pp=2,tp=2", engine=Engine.VLLM, batch=3, prompt=5, output=2))
    for phase, n in ((Phase.PREFILL, 15), (Phase.DECODE, 3)):
        assert {(r.part, r.kind, r.shape) for r in rows if r.phase is phase} == {
            (Part.EMBED, Kind.ALL_REDUCE, (n, 64)),
            (Part.ATTN, Kind.ALL_REDUCE, (n, 64)),
            (Part.MLP, Kind.ALL_REDUCE, (n, 64)),
            (Part.STAGE, Kind.SEND, (n, 32)),
            (Part.STAGE, Kind.RECV, (n, 32)),
            (Part.STAGE, Kind.ALL_GATHER, (n, 64)),
            (Part.LM_HEAD, Kind.GATHER, (3, 64)),  # of 101 rows, padded to 128
        }


def test_what_vllm_cannot_split_is_refused(make: Make, small: Model) -> None:
    """Heads that tp=3 divides, but no vocabulary or boundary; and a table that a worker lacks."""
    heads = replace(small, attention=replace(small.attention, n_heads=6, n_kv_heads=3))
    divided = replace(heads, vocab=192)
    assert predict(make(divided, "tp=3", engine=Engine.VLLM))
    for model, plan, message in (
        (heads, "tp=3", r"tp=3 does not divide 128, .* of small .*Use a tp"),
        (divided, "pp=2,tp=3", r"tp=3 does not divide hidden=64 of small, .*Use a tp"),
        ("google/gemma-4-E2B-it", "tp=4", r"vLLM 0\.8\.5, which has no models with embeddings of"),
    ):
        with pytest.raises(PlanError, match=message):
            predict(make(model, plan, engine=Engine.VLLM))
