"""Prefix caches: hits of traces and conversations against independent counts, and the conservation of blocks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from constant_server import DECODE_S, PREFILL_S, at_once, pool

from meshscope.serving.engine import BatchingEngine, EnginePolicy
from meshscope.serving.load import Load, conversation_load, recorded_load
from meshscope.serving.simulation import served_alone
from meshscope.serving.step_costs import CacheBlocks

POLICY = EnginePolicy(max_sequences=4, max_step_tokens=4096)
HUGE = CacheBlocks(n_blocks=10_000_000)


def mooncake(path: Path, n: int, seed: int = 0) -> Load:
    """A trace in which prompts extend one of few earlier prompts, as Mooncake writes it."""
    rng = np.random.default_rng(seed)
    chains, next_id, lines = [[0], [1]], 2, []
    for at in range(n):
        chain = list(chains[rng.integers(len(chains))])[: rng.integers(1, 9)]
        n_new = int(rng.integers(0, 4))
        chain += range(next_id, next_id + n_new)
        next_id += n_new
        chains.append(chain)
        length = 512 * len(chain) - int(rng.integers(0, 300)) * bool(n_new)
        line = {"timestamp": 400 * at, "input_length": length, "output_length": 20}
        lines.append(json.dumps({**line, "hash_ids": chain}))
    path.write_text("\n".join(lines))
    return recorded_load(path, rate_per_s=None, n_requests=None)[0]


def served(load: Load, blocks: CacheBlocks = HUGE) -> BatchingEngine:
    return served_alone(load, pool(POLICY, blocks))[1]


def ideal_hits(load: Load) -> int:
    """Tokens of each prompt that an earlier prompt of the trace begins with, with a cache of any size."""
    assert load.prefixes is not None
    seen, n_hit = set[int](), 0
    for prefix, n_prompt in zip(load.prefixes, load.n_prompt.tolist(), strict=True):
        n = 0
        for node, size in prefix:
            if node not in seen:
                break
            n += size
        seen.update(node for node, _ in prefix)
        n_hit += min(n // 16 * 16, n_prompt - 1)
    return n_hit


def test_a_cache_of_any_size_hits_what_earlier_prompts_had(tmp_path: Path) -> None:
    load = mooncake(tmp_path / "trace.jsonl", 300)
    cache = served(load).prefixes
    assert cache is not None
    assert cache.n_asked == load.n_prompt.sum()
    assert cache.n_hit == ideal_hits(load) > 0.3 * cache.n_asked


@pytest.mark.parametrize("n_blocks", [700, 900, 1500, 4000])
def test_a_small_cache_hits_less_and_loses_no_block(tmp_path: Path, n_blocks: int) -> None:
    load = mooncake(tmp_path / "trace.jsonl", 300, seed=n_blocks)
    engine = served(load, CacheBlocks(n_blocks=n_blocks))
    cache = engine.prefixes
    assert cache is not None
    assert engine.n_free == n_blocks >= cache.n_idle > 0  # all are free, some with keys and values
    assert 0 < cache.n_hit < ideal_hits(load)


def test_a_hit_saves_its_tokens_and_a_prompt_of_others_none() -> None:
    load = replace(at_once(2, prompt=512), arrival_s=np.array([0.0, 10.0]))
    alike = replace(load, prefixes=[((7, 512),), ((7, 512),)])
    cache = served(alike).prefixes
    assert cache is not None
    assert cache.n_hit == 511  # the last position is computed in any case


def test_a_conversation_finds_all_that_came_before_and_waits_to_think() -> None:
    drawn = Load(arrival_s=np.zeros(6), n_prompt=np.full(6, 100), n_output=np.full(6, 12))
    load = conversation_load(drawn, 3, 0.0)
    assert load.n_prompt.tolist() == [100, 100, 212, 212, 324, 324]
    requests, engine = served_alone(load, pool(POLICY, HUGE), max_concurrency=1)
    cache = engine.prefixes
    assert cache is not None
    assert cache.n_hit == 2 * (112 // 16 * 16 + 224 // 16 * 16)
    turn_s = PREFILL_S + 11 * DECODE_S
    # One conversation after the other, without a pause.
    assert requests.arrival_s == pytest.approx(np.array([0, 3, 1, 4, 2, 5]) * turn_s)


def test_pauses_come_before_later_turns() -> None:
    drawn = Load(arrival_s=np.zeros(2000), n_prompt=np.full(2000, 100), n_output=np.full(2000, 2))
    load = conversation_load(drawn, 2, 30.0)
    policy = EnginePolicy(max_sequences=2000, max_step_tokens=1_000_000)
    requests, _ = served_alone(load, pool(policy, HUGE))
    pauses_s = requests.arrival_s[1000:] - requests.finish_s[:1000]
    assert pauses_s.mean() == pytest.approx(30, rel=0.1)  # three standard errors of an exponential


def test_a_session_of_a_plain_csv_shares_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "arrival,prompt,output,session\n0,100,28,a\n10,200,8,a\n20,100,8,b\n30,90,8,a\n"
    )
    load, _ = recorded_load(path, rate_per_s=None, n_requests=None)
    assert load.prefixes == [(), ((0, 128),), (), ()]  # the last is shorter than what came before
    cache = served(load).prefixes
    assert cache is not None
    assert cache.n_hit == 128
