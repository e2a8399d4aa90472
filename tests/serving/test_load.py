"""Random and recorded loads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshscope.errors import ParseError, SpecError
from meshscope.serving.load import Arrivals, Load, random_load, recorded_load

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
45.5,GPT-4,300,0,300,API log
118,GPT-4,417,276,693,Conversation log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0]}
{"timestamp": 3000, "input_length": 7319, "output_length": 490, "hash_ids": [0]}
"""


def drawn(arrivals: Arrivals, n: int = 20_000, **changes: Any) -> Load:
    options = {"rate_per_s": 4.0, "prompt": 100, "output": 20, "is_geometric": False, "seed": 0}
    return random_load(arrivals, n_requests=n, **options | changes)


@pytest.mark.parametrize(("arrivals", "spread"), [(Arrivals.POISSON, 1.0), (Arrivals.BURST, 2.0)])
def test_gaps_have_the_mean_and_the_spread_of_their_distribution(arrivals, spread) -> None:
    """The coefficient of variation of a gamma distribution of shape k is 1 / sqrt(k)."""
    gaps_s = np.diff(drawn(arrivals).arrival_s)
    assert float(gaps_s.mean()) == pytest.approx(0.25, rel=0.05)
    assert float(gaps_s.std() / gaps_s.mean()) == pytest.approx(spread, rel=0.05)


def test_lengths_are_fixed_or_geometric() -> None:
    fixed, spread = drawn(Arrivals.POISSON), drawn(Arrivals.POISSON, is_geometric=True)
    assert set(fixed.n_prompt.tolist()) == {100}
    assert float(spread.n_output.mean()) == pytest.approx(20, rel=0.03)
    assert spread.n_output.min() == 1


SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
7,a,1.5,GPT-4,12,3,15,"log, of a session"
9,b,,GPT-4,20,5,25,Conversation log
"""


@pytest.mark.parametrize(
    ("text", "n_empty", "rows"),
    [
        (AZURE, 0, [(0.0, 374, 44), (4.314579, 396, 109), (4.541877, 879, 55)]),
        # Times in seconds from the start; a request that failed has no response tokens.
        (BURST_GPT, 1, [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]),
        (SESSIONS, 0, [(0.0, 12, 3), (2.0, 20, 5)]),
        (MOONCAKE, 0, [(0.0, 6755, 500), (3.0, 7319, 490)]),
    ],
    ids=["azure", "burst_gpt", "burst_gpt with sessions", "mooncake"],
)
def test_a_recorded_trace_is_read(tmp_path, text, n_empty, rows) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    load, n_left_out = recorded_load(path, rate_per_s=None, n_requests=None)
    assert n_left_out == n_empty
    columns = zip(load.arrival_s, load.n_prompt, load.n_output, strict=True)
    assert [tuple(row) for row in columns] == [pytest.approx(row, abs=1e-6) for row in rows]
    faster, _ = recorded_load(path, rate_per_s=2 * load.rate_per_s, n_requests=None)
    assert faster.arrival_s == pytest.approx(load.arrival_s / 2)
    assert recorded_load(path, rate_per_s=None, n_requests=1)[0].n_requests == 1


def test_requests_without_tokens_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + "2023-11-16 18:16:00,0,5\n2023-11-16 18:17:00,5,0\n")
    load, n_empty = recorded_load(path, rate_per_s=None, n_requests=None)
    assert (load.n_requests, n_empty) == (3, 2)
    assert recorded_load(path, rate_per_s=None, n_requests=2)[1] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column ContextTokens, GeneratedTokens, TIMESTAMP"),
        ("a,b\n1,2\n", "no column ContextTokens"),
        ("Timestamp,Model\n1,ChatGPT\n", "no column Request tokens, Response tokens.*BurstGPT"),
        (BURST_GPT + "119,GPT-4\n", ":6: not a request of the trace"),
        (BURST_GPT + "soon,GPT-4,1,2,3,log\n", ":6: not a request of the trace .*soon"),
        (BURST_GPT + "inf,GPT-4,1,2,3,log\n", r":6: not a request of the trace \(time inf\)"),
        (BURST_GPT + "119,GPT-4,-1,2,1,log\n", r":6: .*\(-1 tokens\)"),
        (BURST_GPT + f"119,GPT-4,{'9' * 5000},2,1,log\n", ":6: not a request of the trace"),
        (BURST_GPT + f"119,{'x' * 200_000},1,2,3,log\n", ":6: is not CSV .*field larger"),
        (BURST_GPT + '119,"never closed,1,2,3,log\n', ":6: not a request of the trace"),
        ("x" * 200_000, ":1: no line ends in 100,000 characters"),
        ('{"timestamp": ' + "[" * 100_000, "trace:1: not a request of the trace"),
        (AZURE + "yesterday,3,4\n", r":5: not a request of the trace .*yesterday"),
        (AZURE + "2023-11-16 18:15:46.6,x,4\n", ":5: not a request of the trace"),
        ('{"timestamp": "NaN", "input_length": 1, "output_length": 2}\n', "trace:1: not a request"),
        ('{"timestamp": 1}\n', r"trace:1: not a request of the trace"),
        ("{\n", r"trace:1: not a request of the trace"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 2}', "no requests with prompt"),
        ('{"timestamp": 1, "input_length": -5, "output_length": 2}', r"trace:1: .*\(-5 tokens\)"),
        ('{"timestamp": 1, "input_length": 1e300, "output_length": 2}', r"trace:1: .* tokens\)"),
    ],
)
def test_a_damaged_trace_is_one_message(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ParseError, match=message):
        recorded_load(path, rate_per_s=None, n_requests=None)


@pytest.mark.parametrize(
    ("rate_per_s", "n_requests", "remedy"),
    [
        (0.0, 10, "is not in 1e-06"),
        (float("nan"), 10, "is not in 1e-06"),
        (float("inf"), 10, "is not in 1e-06"),
        (1.0, 0, "use 1 to 1,000,000"),
        (1.0, 10**7, "use 1 to 1,000,000"),
    ],
)
def test_impossible_loads_are_refused(rate_per_s: float, n_requests: int, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        drawn(Arrivals.POISSON, n_requests, rate_per_s=rate_per_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BURST_GPT + "117.5,GPT-4,5,5,10,log\n", ":6: arrives 500 ms before"),
        (AZURE + "2023-11-16 18:15:50.2224670,5,5\n", ":5: arrives 1 s before"),
        (MOONCAKE + '\n{"timestamp": 2998, "input_length": 1, "output_length": 1}\n', ":4: arrives 2 ms before"),
    ],
    ids=["burst_gpt", "azure", "mooncake"],
)  # fmt: skip
def test_arrivals_that_go_backwards_are_refused_with_their_line(tmp_path, text, message) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ParseError, match=f"{message}.*Sort the trace by time"):
        recorded_load(path, rate_per_s=None, n_requests=None)


def test_requests_that_arrive_together_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n1,9,5\n1,5,7\n")
    load, _ = recorded_load(path, rate_per_s=None, n_requests=None)
    assert load.n_prompt.tolist() == [9, 5]
