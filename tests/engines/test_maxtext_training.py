"""MaxText's training step, which `train_compile` compiles: what it sends, by its stored text."""

from collections import Counter
from pathlib import Path

import pytest

import meshscope
from meshscope.events.enums import Kind, Part, Phase

# jit_train_step of MaxText 0.2.5, libtpu 0.0.48: Llama-3.1-8B, 2 layers, 8 sequences of 2,048 tokens.
GOLDEN = Path(__file__).parents[1] / "golden" / "maxtext_training" / "step.hlo.txt.gz"


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> meshscope.Run:
    """The imported step."""
    return meshscope.import_(
        GOLDEN,
        topology="v6e-8",
        mesh="fsdp=8",
        device_order="0,1,2,3,7,6,5,4",
        phase=Phase.STEP,
        out=tmp_path_factory.mktemp("training") / "run",
    )


@pytest.mark.slow
def test_weights_are_gathered_twice_and_gradients_scattered(step: meshscope.Run) -> None:
    """Forward and backward gather each of the seven matrices of a layer: `remat_policy` is full."""
    counts: Counter[tuple[Kind, Part | None]] = Counter()
    for row in step.record.rows:
        if row.dtype == "bf16" and row.payload_bytes and row.payload_bytes > 2**20:
            counts[row.kind, row.part] += row.count
    gathers = [counts[Kind.ALL_GATHER, part] for part in (Part.ATTN, Part.MLP)]
    scatters = [counts[Kind.REDUCE_SCATTER, part] for part in (Part.ATTN, Part.MLP)]
    assert scatters == [2 * 4, 2 * 3]
    assert gathers == [2 * scatters[0], 2 * scatters[1]]
    assert counts[Kind.REDUCE_SCATTER, Part.LM_HEAD] == 1


@pytest.mark.slow
def test_rows_have_axis_and_part_and_no_layer(step: meshscope.Run) -> None:
    rows = step.record.rows
    assert {(row.phase, row.axis, row.layer) for row in rows} == {(Phase.STEP, "fsdp", None)}
    assert all(row.part is not None for row in rows)
    assert step.as_dict()["unattributed"]["count"] == 0


def test_a_training_step_has_a_time(step: meshscope.Run) -> None:
    (time,) = step.record.times
    assert time.phase is Phase.STEP
    assert time.step.value_s == pytest.approx(0.073, rel=0.1)
