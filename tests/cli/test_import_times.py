"""`import`: modeled step times of programs compiled elsewhere, from their text alone."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tables import table

from meshscope.events.timeline import TIMELINE
from meshscope.hardware.chips import chip_of
from meshscope.hardware.interconnect import constants_of
from meshscope.hardware.interconnect.profile import ChipProfile, save_profile
from meshscope.store.read import read_run

STEP = (Path(__file__).parent / "data" / "one_all_reduce.hlo.txt").read_text()
GOLDEN_DIR = Path(__file__).parents[1] / "golden/hlo"
PREFILL = GOLDEN_DIR / "2xv6e_tp8sp_prefill.jax-0.10.2.txt.gz"
DECODE = GOLDEN_DIR / "2xv6e_tp8_decode.jax-0.10.2.txt.gz"
ON_TWO_SLICES = ("--topology", "2xv6e:2x2", "--plan", "tp=8")


@pytest.fixture
def texts() -> list[str]:
    """Prefill and decode of one model, as text."""
    for path, name in ((PREFILL, "prefill.txt"), (DECODE, "decode.txt")):
        Path(name).write_text(gzip.decompress(path.read_bytes()).decode())
    return ["prefill.txt", "decode.txt"]


def _time(meshscope, *arguments: str) -> dict:
    status, out, err = meshscope("import", *arguments, "--json", "--force")
    assert (status, err) == (0, "")
    return json.loads(out)["time"]


def test_each_phase_has_the_time_of_its_step_and_the_request_none(meshscope, texts) -> None:
    time = _time(meshscope, *texts, *ON_TWO_SLICES, "--out", "one")
    assert set(time["steps"]) == {"prefill", "decode"}
    assert time["ttft_s"] > time["tpot_s"] > 0
    assert time["e2e_s"] is None  # how many tokens a request makes is in no dump
    assert {row.dur_s is None for row in read_run(Path("one")).rows} == {False}
    assert (Path("one") / TIMELINE).exists()


def test_a_phase_in_two_texts_has_no_step(meshscope, texts) -> None:
    Path("again.txt").write_text(Path("prefill.txt").read_text())
    time = _time(meshscope, *texts, "again.txt", *ON_TWO_SLICES)
    assert set(time["steps"]) == {"decode"}


@pytest.mark.parametrize(
    ("old", "new"),
    [("is_scheduled=true", "is_scheduled=false"), ("/decode/", "/generate/")],
    ids=["not scheduled", "phase unknown"],
)
def test_what_has_no_time_has_none(meshscope, texts, old: str, new: str) -> None:
    text = Path(texts[1]).read_text()
    assert old in text
    Path(texts[1]).write_text(text.replace(old, new))
    time = _time(meshscope, texts[1], *ON_TWO_SLICES, "--out", "one")
    assert (time["tpot_s"], time["basis"]) == (None, None)
    assert not (Path("one") / TIMELINE).exists()


def test_the_phase_that_the_user_names_is_kept_for_later(meshscope, texts, tmp_path) -> None:
    text = Path(texts[1]).read_text()
    Path(texts[1]).write_text(text.replace("/decode/", "/generate/"))
    ask = (texts[1], *ON_TWO_SLICES, "--phase", "decode", "--out", "one")
    published = _time(meshscope, *ask)
    known = constants_of(chip_of("v6e"))
    slow = replace(known, chip="v6e", by_kind=(), rates=replace(known.rates, latency_s=1.0))
    profile = ChipProfile(
        chip="v6e",
        topology="v6e:2x4",
        plan="tp=8",
        constants=slow,
        fits=(),
        points=(),
        matrices=(),
        memory=(),
        conditions={},
    )
    save_profile(profile, tmp_path / "slow.json", force=True)
    status, out, _ = meshscope("show", "one", "--profile", str(tmp_path / "slow.json"), "--json")
    retimed = json.loads(out)["time"]
    assert status == 0
    n_collectives = sum(row.count for row in read_run(Path("one")).rows)
    assert (
        retimed["tpot_s"] - published["tpot_s"] >= n_collectives
    )  # a second each, or a stage of it


def test_programs_of_one_step_run_one_after_the_other(meshscope, texts) -> None:
    Path("sampler.txt").write_text(Path(texts[1]).read_text())
    one = _time(meshscope, f"decode={texts[1]}", *ON_TWO_SLICES, "--out", "one")
    two = _time(
        meshscope, "decode=decode.txt", "decode=sampler.txt", *ON_TWO_SLICES, "--out", "two"
    )
    assert two["tpot_s"] == pytest.approx(2 * one["tpot_s"])
    rows, alone = read_run(Path("two")).rows, read_run(Path("one")).rows
    assert len(rows) == 2 * len(alone)
    second = [row.start_s for row in rows[len(alone) :]]
    assert second == pytest.approx([row.start_s + one["tpot_s"] for row in alone])
    assert meshscope("show", "two", "--json").status == 0


def test_a_program_given_as_another_phase_is_refused(meshscope, texts) -> None:
    status, out, err = meshscope("import", f"prefill={texts[1]}", *ON_TWO_SLICES)
    assert (status, out) == (1, "")
    assert err.endswith("its scopes name decode. Give the file without 'prefill='.\n")


LLAMA = Path(__file__).parents[1] / (
    "published/programs/tpu_inference_0.12-llama-8b-v6e_1x2-tp2-prefill8192-2layers.hlo.txt.gz"
)
ON_TWO_CHIPS = (str(LLAMA), "--topology", "v6e:1x2", "--mesh", "model=2", "--phase", "prefill")


def test_a_program_of_two_layers_stands_for_all(meshscope) -> None:
    """CCL-Bench measured 177.8 ms for this prefill of all 32 layers."""
    ask = (*ON_TWO_CHIPS, "--layers", "32", "--lengths", "8x1024:1024", "--out", "whole")
    named = (*ON_TWO_CHIPS, "--model", "meta-llama/Llama-3.1-8B", "--out", "named")
    assert _time(meshscope, *named)["ttft_s"] == pytest.approx(0.1778, rel=0.15)
    assert meshscope("show", "named").out.startswith(
        "meta-llama/Llama-3.1-8B (32 layers) on v6e:1x2"
    )
    time = _time(meshscope, *ask)
    assert time["ttft_s"] == pytest.approx(0.1778, rel=0.15)
    run = read_run(Path("whole"))
    layers = [row.layer for row in run.rows if row.part == "mlp"]
    assert layers == list(range(32))
    starts = [row.start_s for row in run.rows if row.part == "mlp"]
    assert all(a < b for a, b in pairwise(starts))
    assert "time of 32 layers from a program of 2: layer 0 repeats 31 times" in run.times[0].notes
    out = meshscope("show", "whole", "--full").out
    assert "extended to 32 layers; a device's sequences: 8x1024:1024" in " ".join(out.split())


@table
def test_lengths_give_the_throughput_of_a_step(meshscope, mesh, lengths, n_sequences) -> None:
    """Sequences with one new token decode, on every data-parallel rank."""
    ask = (str(LLAMA), "--topology", "v6e:1x2", "--mesh", mesh, "--phase", "decode")
    status, out, err = meshscope("import", *ask, "--lengths", lengths, "--out", "run", "--json")
    assert status == 0, err
    document = json.loads(out)
    expected = None if n_sequences is None else n_sequences / document["time"]["tpot_s"]
    assert document["throughput"]["decode_tokens_per_s"] == pytest.approx(expected)
    assert document["throughput"]["output_tokens_per_s"] is None


@table
def test_bad_layers_and_lengths_leave_nothing(meshscope, options, message) -> None:
    status, out, err = meshscope("import", *ON_TWO_CHIPS, *options)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert message in err
    assert not Path("runs").exists()


def test_a_program_of_unknown_requests_is_neither_faster_nor_slower(meshscope) -> None:
    model = ("meta-llama/Llama-3.1-8B", "--topology", "v6e:1x2", "--plan", "tp=2")
    engine = (*ON_TWO_CHIPS, "--model", model[0], "--lengths", "prefill=8x1024:1024")
    meshscope("import", *engine, "--out", "engine")
    meshscope("predict", *model, "--batch", "8", "--prompt", "1024", "--out", "own")
    out = " ".join(meshscope("compare", "engine", "own").out.split())
    assert "prefill: 1 extra" in out  # the gather of the logits, in another program of the engine
    assert "Different settings: plan model=2 (A) and tp=2 (B)." in out
    assert "is faster" not in out
    one_phase = meshscope("import", *engine, "--out", "engine", "--force", "--json").out
    assert set(json.loads(one_phase)["totals"]) == {"prefill"}


@table
def test_an_import_without_times_says_why(meshscope, tmp_path, topology, scope, reason) -> None:
    text = STEP.replace("{scope}", scope)
    path = tmp_path / "f.hlo.txt"
    path.write_text(text)
    out = meshscope("import", str(path), "--topology", topology, "--mesh", "x=8").out
    assert f"- times are unknown: {reason}" in " ".join(out.split())
