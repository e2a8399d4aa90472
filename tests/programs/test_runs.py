"""Expert order of received rows, against a stable sort of the buffer."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="the programs need JAX")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_ragged", [True, False])
@pytest.mark.parametrize("n_experts", [1, 3])
def test_rows_are_ordered_by_expert_and_back(seed: int, n_experts: int, *, is_ragged: bool) -> None:
    """Some senders have no rows for some experts or too many to send; the buffer is not full."""
    from meshscope.programs.jax.runs import received_runs  # noqa: PLC0415  imports JAX

    random = np.random.default_rng(seed)
    n_senders, n_slots = 5, 6
    counts = random.integers(0, 4, (n_senders, n_experts)) * random.integers(0, 2, n_experts)
    sizes = np.minimum(counts.sum(axis=1), n_slots - seed % 3)
    bases = np.cumsum(sizes) - sizes if is_ragged else n_slots * np.arange(n_senders)
    n_rows = n_senders * n_slots
    expert_of = np.full(n_rows, n_experts)  # none
    for sender in range(n_senders):
        experts = np.repeat(np.arange(n_experts), counts[sender])[: sizes[sender]]
        expert_of[bases[sender] : bases[sender] + len(experts)] = experts
    order = np.argsort(expert_of, kind="stable")
    n_used = int((expert_of < n_experts).sum())

    runs = received_runs(*(a.astype(np.int32) for a in (counts, sizes, bases)), n_rows=n_rows)

    assert runs.rows_of_experts.tolist() == [int((expert_of == e).sum()) for e in range(n_experts)]
    assert runs.sources[:n_used].tolist() == order[:n_used].tolist()
    used = np.flatnonzero(expert_of < n_experts)
    assert np.asarray(runs.places)[used].tolist() == np.argsort(order)[used].tolist()
    assert 0 <= int(np.min(runs.sources)) <= int(np.max(runs.sources)) < n_rows
