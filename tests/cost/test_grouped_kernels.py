"""A fused kernel of experts: its rows, tiles and reads against random routing, its bytes, and what is refused."""

import json
from collections.abc import Mapping

import numpy as np
import pytest
from made import closed_of, experiment_with
from tables import table

import meshscope
from meshscope.cost.features import PARTS, Cost
from meshscope.cost.kernels import TILE_ROWS
from meshscope.errors import MeshscopeError
from meshscope.events.enums import Part, Phase
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.plans.dispatch import FUSED_BLOCK_TOKENS, DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.program import Program

MODEL, N_EXPERTS, N_ACTIVE, N_DEVICES, N_LAYERS = "Qwen/Qwen3-30B-A3B", 128, 8, 4, 48
CLOCK_HZ = 1.75e9  # of v6e


def _experiment(batch: int, prompt: int, plan: str = "tp=4,ep=4") -> Experiment:
    program = Program(dispatch=DispatchForm.FUSED)
    return experiment_with(MODEL, plan, "v6e:2x2", batch=batch, prompt=prompt, program=program)


def _costs(experiment: Experiment, phase: Phase) -> Mapping[Cost, float]:
    """The costs of the routed experts in one layer."""
    costs = closed_of(experiment, phase)[1].costs[0, PARTS.index(Part.MOE_EXPERTS)]
    return dict(zip(Cost, costs / N_LAYERS, strict=True))


def _drawn(n_tokens: int) -> tuple[float, float]:
    """Tiles, and experts with rows, of a device in one layer: the mean over random routings."""
    rng = np.random.default_rng(0)
    n_local = n_tokens // N_DEVICES
    tile_rows = min(TILE_ROWS, n_local)
    tiles, hits = [], []
    for _ in range(20):
        chosen = rng.random((n_tokens, N_EXPERTS)).argpartition(N_ACTIVE, axis=1)[:, :N_ACTIVE]
        of_block = np.arange(n_tokens) % n_local // FUSED_BLOCK_TOKENS
        for block in range(-(-n_local // FUSED_BLOCK_TOKENS)):
            rows = np.bincount(chosen[of_block == block].ravel(), minlength=N_EXPERTS)
            tiles.append(np.ceil(rows / tile_rows).sum() * tile_rows / TILE_ROWS / N_DEVICES)
            hits.append((rows > 0).sum() / N_DEVICES)
    return sum(tiles) / 20, sum(hits) / 20


@pytest.mark.parametrize(
    ("batch", "prompt", "phase"),
    [(1, 4096, Phase.PREFILL), (2, 1024, Phase.PREFILL), (64, 128, Phase.DECODE)],
)
def test_tiles_and_reads_are_those_of_random_routing(batch: int, prompt: int, phase: Phase) -> None:
    experiment = _experiment(batch, prompt)
    costs = _costs(experiment, phase)
    n_tokens = batch * (prompt if phase is Phase.PREFILL else 1)
    tiles, hits = _drawn(n_tokens)
    facts = compiler_facts("v6e").fused_expert_cycles
    assert facts is not None
    row_cycles, tile_cycles = facts
    assert costs[Cost.KERNEL_S] * CLOCK_HZ / tile_cycles == pytest.approx(tiles, rel=0.1)
    n_rows = n_tokens * N_ACTIVE / N_DEVICES
    assert costs[Cost.SENT_S] * CLOCK_HZ / row_cycles == pytest.approx(n_rows)
    expert_bytes = 3 * 2048 * 768 * 2
    assert costs[Cost.CHOSEN_BYTES] / expert_bytes == pytest.approx(hits, rel=0.01)


def test_the_experts_are_read_again_in_each_block() -> None:
    once, twice = (_costs(_experiment(1, n), Phase.PREFILL) for n in (2048, 4096))
    assert twice[Cost.CHOSEN_BYTES] == pytest.approx(2 * once[Cost.CHOSEN_BYTES])


def test_rows_of_a_tp_group_are_split_and_gathered_again() -> None:
    """4,096 tokens, 1,024 on each device, 8 rows of a token there and back."""
    run = meshscope.predict(
        MODEL, topology="v6e:2x2", plan="tp=4,ep=4", prompt=4096, dispatch="fused"
    )
    of_layer = run.collectives.filter(layer=0, phase="prefill").select("part", "kind", "wire_bytes")
    row_bytes = 2048 * 2
    assert [row for row in of_layer.rows() if row[0].startswith("moe")] == [
        ("moe.dispatch", "all_gather", 4 * 128 * 4 * 3 // 4),
        ("moe.dispatch", "all_to_all", 8192 * row_bytes * 3 // 4),
        ("moe.combine", "all_to_all", 8192 * row_bytes * 3 // 4),
        ("moe.combine", "all_gather", 4096 * row_bytes * 3 // 4),
    ]


def test_the_time_says_what_it_assumes() -> None:
    run = meshscope.predict(MODEL, topology="v6e:2x2", plan="tp=4,ep=4", dispatch="fused")
    assert "blocks of 512 tokens" in json.dumps(run.as_dict())
    plain = meshscope.predict(MODEL, topology="v6e:2x2", plan="tp=4,ep=4")
    assert "blocks of 512" not in json.dumps(plain.as_dict())


@table
def test_what_the_kernel_cannot_do_is_refused(topology: str, plan: str, message: str) -> None:
    with pytest.raises(MeshscopeError, match=message):
        meshscope.predict(MODEL, topology=topology, plan=plan, batch=2, dispatch="fused")


def test_dense_models_and_programs_have_no_fused_kernel() -> None:
    with pytest.raises(MeshscopeError, match="has no experts"):
        meshscope.predict("Qwen/Qwen3-8B", topology="v6e:2x2", plan="tp=4", dispatch="fused")
    with pytest.raises(MeshscopeError, match="no program of meshscope has"):
        meshscope.compile(MODEL, topology="v6e:2x2", plan="tp=4,ep=4", dispatch="fused")
