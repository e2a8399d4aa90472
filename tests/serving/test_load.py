"""Requests that arrive: rates, lengths, traces, and prefixes that they share."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constant_server import DECODE_S, PREFILL_S, at_once, pool
from tables import stored, table

from meshscope.errors import ParseError
from meshscope.serving.engine import BatchingEngine, EnginePolicy
from meshscope.serving.load import (
    Arrivals,
    Lengths,
    Load,
    conversation_load,
    random_load,
    read_quantiles,
    recorded_load,
)
from meshscope.serving.simulation import served_alone
from meshscope.serving.step_costs import CacheBlocks

TRACES: dict[str, str] = stored(Path(__file__).with_suffix(".yaml"))["traces"]
AZURE = TRACES["azure"]


@pytest.fixture
def trace(tmp_path: Path, text: str) -> Path:
    """The file of a trace of this name with perhaps further lines, or of other lines alone."""
    name, _, lines = text.partition("\n")
    path = tmp_path / "trace"
    path.write_text(TRACES[name] + lines if name in TRACES else text)
    return path


def read(path: Path, n_requests: int | None = None) -> tuple[Load, int]:
    return recorded_load(path, rate_per_s=None, n_requests=n_requests)


def drawn(arrivals: Arrivals, n: int = 20_000, **changes: Any) -> Load:
    options = {"rate_per_s": 4.0, "prompt": 100, "output": 20, "lengths": Lengths.FIXED, "seed": 0}
    return random_load(arrivals.burstiness, n_requests=n, **options | changes)


@pytest.mark.parametrize(("arrivals", "spread"), [(Arrivals.POISSON, 1.0), (Arrivals.BURST, 2.0)])
def test_gaps_have_the_mean_and_the_spread_of_their_distribution(arrivals, spread) -> None:
    """The coefficient of variation of a gamma distribution of shape k is 1 / sqrt(k)."""
    gaps_s = np.diff(drawn(arrivals).arrival_s)
    assert float(gaps_s.mean()) == pytest.approx(0.25, rel=0.05)
    assert float(gaps_s.std() / gaps_s.mean()) == pytest.approx(spread, rel=0.05)


def test_lengths_have_the_quantiles_of_a_dataset(tmp_path: Path) -> None:
    """Quantiles of 20,000 draws have an error of at most 0.5 / sqrt(20,000)."""
    file = tmp_path / "q.csv"
    file.write_text("quantile,prompt,output\n0,10,1\n0.5,512,128\n0.9,2048,400\n1,8192,1024\n")
    load = drawn(Arrivals.POISSON, lengths=read_quantiles(file))
    assert np.quantile(load.n_prompt, [0.5, 0.9]) == pytest.approx([512, 2048], rel=0.05)
    assert np.quantile(load.n_output, [0.5, 0.9]) == pytest.approx([128, 400], rel=0.05)
    assert abs(float(np.corrcoef(load.n_prompt, load.n_output)[0, 1])) < 0.05


@table
def test_bad_quantiles_are_refused(tmp_path: Path, rows: str) -> None:
    file = tmp_path / "q.csv"
    file.write_text(f"quantile,prompt,output\n{rows}")
    with pytest.raises(ParseError, match=r"quantile \(0 to 1\), prompt and output"):
        read_quantiles(file)


def test_lengths_are_fixed_or_geometric() -> None:
    fixed, spread = drawn(Arrivals.POISSON), drawn(Arrivals.POISSON, lengths=Lengths.GEOMETRIC)
    assert set(fixed.n_prompt.tolist()) == {100}
    assert float(spread.n_output.mean()) == pytest.approx(20, rel=0.03)
    assert spread.n_output.min() == 1


@table
def test_a_recorded_trace_is_read(trace: Path, n_empty, rows) -> None:
    """Times in seconds from the start; a request that failed has no response tokens."""
    load, n_left_out = read(trace)
    assert n_left_out == n_empty
    columns = zip(load.arrival_s, load.n_prompt, load.n_output, strict=True)
    assert [list(row) for row in columns] == [pytest.approx(row, abs=1e-6) for row in rows]
    faster, _ = recorded_load(trace, rate_per_s=2 * load.rate_per_s, n_requests=None)
    assert faster.arrival_s == pytest.approx(load.arrival_s / 2)
    assert read(trace, 1)[0].n_requests == 1


def test_requests_without_tokens_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + "2023-11-16 18:16:00,0,5\n2023-11-16 18:17:00,5,0\n")
    load, n_empty = read(path)
    assert (load.n_requests, n_empty) == (3, 2)
    assert read(path, 2)[1] == 0


@table
def test_a_damaged_trace_is_one_message(trace: Path, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        read(trace)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"burst_gpt\n119,GPT-4,{'9' * 5000},2,1,log\n", ":6: not a request of the trace"),
        (f"burst_gpt\n119,{'x' * 200_000},1,2,3,log\n", ":6: is not CSV .*field larger"),
        ("x" * 200_000, ":1: no line ends in 100,000 characters"),
        ('{"timestamp": ' + "[" * 100_000, "trace:1: not a request of the trace"),
    ],
    ids=["a number", "a cell", "a line", "nesting"],
)
def test_a_trace_of_any_size_is_one_message(trace: Path, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        read(trace)


def test_requests_that_arrive_together_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n1,9,5\n1,5,7\n")
    load, _ = read(path)
    assert load.n_prompt.tolist() == [9, 5]


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
