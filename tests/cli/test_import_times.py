"""`import`: modeled step times of programs compiled elsewhere, from their text alone."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tables import table
from tests.cli.conftest import words_of

from meshscope.events.timeline import TIMELINE
from meshscope.store.read import read_run

pytestmark = pytest.mark.usefixtures("here")


def _time(meshscope, line: str) -> dict:
    status, out, err = meshscope("import", *words_of(line), "--json", "--force")
    assert (status, err) == (0, "")
    return json.loads(out)["time"]


def test_each_phase_has_the_time_of_its_step_and_the_request_none(meshscope) -> None:
    time = _time(meshscope, "prefill.hlo.txt.gz decode.hlo.txt.gz $two_slices --out one")
    assert set(time["steps"]) == {"prefill", "decode"}
    assert time["ttft_s"] > time["tpot_s"] > 0
    assert time["e2e_s"] is None  # how many tokens a request makes is in no dump
    assert {row.dur_s is None for row in read_run(Path("one")).rows} == {False}
    assert (Path("one") / TIMELINE).exists()


def test_a_phase_in_two_texts_has_no_step(meshscope) -> None:
    Path("again.txt.gz").write_bytes(Path("prefill.hlo.txt.gz").read_bytes())
    texts = "prefill.hlo.txt.gz decode.hlo.txt.gz again.txt.gz"
    assert set(_time(meshscope, f"{texts} $two_slices")["steps"]) == {"decode"}


def test_programs_of_one_step_run_one_after_the_other(meshscope) -> None:
    Path("sampler.txt.gz").write_bytes(Path("decode.hlo.txt.gz").read_bytes())
    one = _time(meshscope, "decode=decode.hlo.txt.gz $two_slices --out one")
    both = "decode=decode.hlo.txt.gz decode=sampler.txt.gz"
    two = _time(meshscope, f"{both} $two_slices --out two")
    assert two["tpot_s"] == pytest.approx(2 * one["tpot_s"])
    rows, alone = read_run(Path("two")).rows, read_run(Path("one")).rows
    assert len(rows) == 2 * len(alone)
    second = [row.start_s for row in rows[len(alone) :]]
    assert second == pytest.approx([row.start_s + one["tpot_s"] for row in alone])
    assert meshscope("show", "two", "--json").status == 0


def test_a_program_of_two_layers_stands_for_all(meshscope) -> None:
    """CCL-Bench measured 177.8 ms for this prefill of all 32 layers."""
    named = _time(meshscope, "$llama --model meta-llama/Llama-3.1-8B --out named")
    assert named["ttft_s"] == pytest.approx(0.1778, rel=0.15)
    time = _time(meshscope, "$llama --layers 32 --lengths 8x1024:1024 --out whole")
    assert time["ttft_s"] == pytest.approx(0.1778, rel=0.15)
    rows = [row for row in read_run(Path("whole")).rows if row.part == "mlp"]
    assert [row.layer for row in rows] == list(range(32))
    assert all(a.start_s < b.start_s for a, b in pairwise(rows))


@table
def test_lengths_give_the_throughput_of_a_step(meshscope, mesh, lengths, n_sequences) -> None:
    """Sequences with one new token decode, on every data-parallel rank."""
    line = f"import $llama --mesh {mesh} --phase decode --lengths {lengths} --json"
    status, out, err = meshscope(*words_of(line))
    assert status == 0, err
    document = json.loads(out)
    expected = None if n_sequences is None else n_sequences / document["time"]["tpot_s"]
    assert document["throughput"]["decode_tokens_per_s"] == pytest.approx(expected)
    assert document["throughput"]["output_tokens_per_s"] is None
