"""`import`: HLO text of others becomes a run without a model."""

import gzip
import json
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest
from tables import table
from tests.cli.conftest import words_of

from meshscope.analysis.budget import LIMITS, Budget, Filter, checks_of
from meshscope.events.timeline import TIMELINE
from meshscope.reports.budget import sentence
from meshscope.store.read import read_run

DUMP = (Path(__file__).parent / "data" / "two_all_reduces.hlo.txt").read_text()
STEP = DUMP.replace("prefill/layer0/", "")
NAMES = (
    *("ep=8", "expert=8", "sp=8", "cp=8", "pp=8", "dcp=8", "model=8", "data=8", "fsdp=8", "dp=8"),
    *("tensor=8", "tp=8", "x=8", "x=2,y=4", "ep=2,tp=4", "ep=4,sp=2", "dp=2,data=4", "pp=2,cp=4"),
    *("expert=2,model=4", "context=2,stage=4", "ep=2,fsdp=4", "sequence_parallel=8"),
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ":1: is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"\x1f\x8b" + bytes(20), "the gzip file is damaged"),
        (b"\x1f\x8b\x08cut", "the gzip file is damaged"),
        (b"root:x:0:0\n", "got 'root:x:0:0'"),
        (b"\xff\xfe\x00", "is not text"),
        (b"Obj\x01avro", "expected a line 'HloModule NAME, ...', got 'Obj"),
        (bytes(range(256)), "is not text"),
        (pickle.dumps([1], 0), "expected a line 'HloModule NAME, ...', got '(lp0'"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--topology", "v6e-8", "--plan", "tp=8")])
def test_a_file_of_no_known_kind_is_named_before_options(meshscope, content, words, options):
    Path("dump.txt").write_bytes(content)
    status, out, err = meshscope("import", "dump.txt", *options)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("meshscope: dump.txt")
    assert words in err
    assert "--topology" not in err
    assert [path.name for path in Path().iterdir()] == ["dump.txt"]


def test_the_text_is_kept_as_it_is(meshscope) -> None:
    Path("prefill.txt").write_text(DUMP)
    assert meshscope("import", "prefill.txt", "--topology", "v6e-8", "--plan", "tp=8").status == 0
    assert Path("runs/prefill-v6e-2x4-tp8/hlo/prefill.txt").read_text() == DUMP


@pytest.mark.usefixtures("here")
def test_plots_that_are_not_drawn_say_what_may_communicate(meshscope) -> None:
    pytest.importorskip("vl_convert", reason="needs the extra plots")
    ask = ("calls_pfft3d.hlo.txt", "--topology", "v6e-16", "--mesh", "x=16", "--out", "fft")
    meshscope("import", *ask)
    answer = "".join(map(str, meshscope("export", "fft", "--to", "plots", "--out", "plots")))
    assert "(0 plots; 1 custom call 'pfft3d' may communicate)" in answer


@pytest.mark.usefixtures("here")
def test_what_may_communicate_keeps_no_limit_on_collectives(meshscope) -> None:
    layout = ("--topology", "v6e-16", "--mesh", "x=16", "--phase", "decode", "--out", "fft")
    assert meshscope("import", "calls_pfft3d.hlo.txt", *layout).status == 0
    names = ("count", "max_wire_bytes", "min_count")
    limits = tuple(replace(LIMITS[name], value=0) for name in names)
    checks = checks_of(read_run(Path("fft")), [Budget(of=Filter(), limits=limits)], lambda: None)
    assert [(c.value, c.is_kept) for c in checks] == [(None, False), (None, False), (0, True)]
    assert sentence(checks[0]) == (
        "collectives: count unknown (1 custom call 'pfft3d' may communicate), exactly 0"
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", NAMES)
def test_the_axes_of_a_mesh_are_names(meshscope, mesh: str) -> None:
    Path("step.txt").write_text(STEP)
    layout = ("--topology", "v6e-8", "--mesh", mesh, "--phase", "step", "--out", "run")
    assert meshscope("import", "step.txt", *layout).status == 0
    axis = "+".join(axis.partition("=")[0] for axis in mesh.split(","))
    run = read_run(Path("run"))
    assert [(row.axis, row.axis_reason, row.stage) for row in run.rows] == [(axis, None, None)] * 2
    for command in (
        ("show", "run", "--full"),
        ("compare", "run", "run"),
        ("report", "run", "--out", "run.html"),
        *(("export", "run", "--to", to, "--out", to) for to in ("card", "ccl-bench", "csv")),
    ):
        result = meshscope(*command)
        assert result.status == 0, (command, result.err)


def _time(meshscope, line: str) -> dict:
    status, out, err = meshscope("import", *words_of(line), "--json", "--force")
    assert (status, err) == (0, "")
    return json.loads(out)["time"]


@pytest.mark.usefixtures("here")
def test_each_phase_has_the_time_of_its_step_and_the_request_none(meshscope) -> None:
    time = _time(meshscope, "prefill.hlo.txt.gz decode.hlo.txt.gz $two_slices --out one")
    assert set(time["steps"]) == {"prefill", "decode"}
    assert time["ttft_s"] > time["tpot_s"] > 0
    assert time["e2e_s"] is None  # how many tokens a request makes is in no dump
    assert {row.dur_s is None for row in read_run(Path("one")).rows} == {False}
    assert (Path("one") / TIMELINE).exists()


@pytest.mark.usefixtures("here")
def test_a_phase_in_two_texts_has_no_step(meshscope) -> None:
    Path("again.txt.gz").write_bytes(Path("prefill.hlo.txt.gz").read_bytes())
    texts = "prefill.hlo.txt.gz decode.hlo.txt.gz again.txt.gz"
    assert set(_time(meshscope, f"{texts} $two_slices")["steps"]) == {"decode"}


@pytest.mark.usefixtures("here")
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


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_program_of_two_layers_stands_for_all(meshscope) -> None:
    """CCL-Bench measured 177.8 ms for this prefill of all 32 layers."""
    named = _time(meshscope, "$llama --model meta-llama/Llama-3.1-8B --out named")
    assert named["ttft_s"] == pytest.approx(0.1778, rel=0.15)
    time = _time(meshscope, "$llama --layers 32 --step-lengths 8x1024:1024 --out whole")
    assert time["ttft_s"] == pytest.approx(0.1778, rel=0.15)
    rows = [row for row in read_run(Path("whole")).rows if row.part == "mlp"]
    assert [row.layer for row in rows] == list(range(32))
    assert all(a.start_s < b.start_s for a, b in pairwise(rows))


@table
@pytest.mark.usefixtures("here")
def test_lengths_give_the_throughput_of_a_step(meshscope, mesh, lengths, n_sequences) -> None:
    """Sequences with one new token decode, on every data-parallel rank."""
    line = f"import $llama --mesh {mesh} --phase decode --step-lengths {lengths} --json"
    status, out, err = meshscope(*words_of(line))
    assert status == 0, err
    document = json.loads(out)
    expected = None if n_sequences is None else n_sequences / document["time"]["tpot_s"]
    assert document["throughput"]["decode_tokens_per_s"] == pytest.approx(expected)
    assert document["throughput"]["output_tokens_per_s"] is None


def test_a_file_of_a_store_is_copied_and_named(meshscope) -> None:
    """fsspec's file system in memory stands for gs:// and s3://."""
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/dumps/prefill.txt", DUMP.encode())
    layout = ("--topology", "v6e-8", "--plan", "tp=8")
    out = json.loads(
        meshscope("import", "memory://bucket/dumps/prefill.txt", *layout, "--json").out
    )
    assert len(out["collectives"]) == len(
        json.loads(meshscope("import", str(dump()), *layout, "--json").out)["collectives"]
    )
    kept = read_run(Path("runs/prefill-v6e-2x4-tp8"))
    assert kept.manifest.experiment.imported == ("memory://bucket/dumps/prefill.txt",)
    store.pipe("/bucket/bad.txt", b"HloModule x\nENTRY {")
    status, _, err = meshscope("import", "memory://bucket/bad.txt", *layout)
    assert (status, err.count("\n")) == (1, 1)
    assert "memory://bucket/bad.txt" in err
    assert ".meshscope-" not in err
    for name, words in (
        ("memory://bucket/none", "Check the name"),
        ("nosuch://x/y", "Protocol not known"),
    ):
        status, _, err = meshscope("import", name, *layout)
        assert (status, err.count("\n")) == (1, 1)
        assert words in err


def dump() -> Path:
    path = Path("local.txt")
    path.write_text(DUMP)
    return path


def test_a_folder_of_a_store_has_limits(meshscope, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fsspec.filesystem("memory")
    for number in range(3):
        store.pipe(f"/many/{number}.trace.json", b"{}")
    monkeypatch.setattr("meshscope.files.MAX_FETCHED_FILES", 2)
    status, _, err = meshscope("import", "memory://many")
    assert (status, err.count("\n")) == (1, 1)
    assert "has 3 files" in err
    monkeypatch.setattr("meshscope.files.import_module", missing)
    assert "pip install 'meshscope[remote]'" in meshscope("import", "gs://bucket/x").err


def missing(name: str) -> None:
    raise ImportError(f"No module named '{name}'")
