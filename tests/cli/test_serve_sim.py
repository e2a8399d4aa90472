"""`serve-sim`: the verdict on the rate, the same figures as JSON, and fits to a benchmark."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import words_of


def simulated(meshscope, line: str) -> dict:
    return json.loads(meshscope(*words_of(f"$serve {line} --json")).out)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--apart 1:2 --transfer dcn"])
def test_the_answer_has_twelve_lines(meshscope, options: str) -> None:
    status, out, err = meshscope(*words_of(f"$serve --rate 2 --slo ttft=0.5,tpot=0.05 {options}"))
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert (max(map(len, lines)) <= 80, len(lines) <= 12) == (True, True)
    assert "rate      stable: " in out
    assert "requests/s, 100.0% of all, within TTFT 500 ms and TPOT 50 ms" in out
    assert "bound by  the device" in out
    assert "assumed   predicted step times" in out


@pytest.mark.slow
def test_full_adds_conditions_behind_the_answer(meshscope) -> None:
    ask = words_of("$serve --rate 2 --apart 1:2")
    short, full = (meshscope(*ask, *option).out for option in ((), ("--full",)))
    kept = [line for line in full.splitlines() if not line.startswith("request ")]
    assert kept[: len(short.splitlines())] == short.splitlines()
    assert max(map(len, kept)) <= 80
    for text in ("100 requests, poisson", "256 sequences and 2,048 tokens", "over DCN; waits "):
        assert text in full
        assert text not in short


def test_a_recorded_load(meshscope) -> None:
    rows = [f"2023-11-16 18:15:{second:02},{300 + second},10" for second in range(20)]
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, "2023-11-16 18:16:00,999999,9"]
    Path("trace.csv").write_text("\n".join(rows))
    line = "serve-sim Llama-3.1-8B $tp8 --requests 100 --arrivals trace.csv --json"
    status, out, err = meshscope(*words_of(line))  # 131,072 positions
    document = json.loads(out)
    note = "left out: 1 request beyond the context of the model\n"
    assert (status, err, document["left_out"]["n_beyond_context"]) == (0, note, 1)
    assert document["offered_per_s"] == pytest.approx(1.0)
