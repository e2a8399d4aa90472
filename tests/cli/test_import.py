"""`import`: HLO text of others becomes a run without a model."""

import gzip
import json
import pickle
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from tables import table

from meshscope.analysis.budget import LIMITS, Budget, Filter, checks_of
from meshscope.plans.plan import Plan
from meshscope.reports.budget import sentence
from meshscope.reports.export.card import card_of
from meshscope.store.read import read_run

DATA = Path(__file__).parent / "data"
FOREIGN = Path(__file__).parents[1] / "golden/hlo/foreign_step.hlo.txt"
TP8 = ("--topology", "v6e-8", "--plan", "tp=8")


DUMP = (DATA / "two_all_reduces.hlo.txt").read_text()


@pytest.fixture
def dump(tmp_path: Path) -> str:
    """An all-reduce in attention and one in the MLP."""
    (tmp_path / "prefill.txt").write_text(DUMP)
    return "prefill.txt"


def test_a_dump_becomes_a_run(meshscope, dump: str) -> None:
    status, out, err = meshscope("import", dump, *TP8, "--full")
    assert (status, err) == (0, "")
    run = read_run(Path("runs/prefill-v6e-2x4-tp8"))
    assert run.manifest.experiment.as_dict() == {
        "imported": [dump],
        "plan": "tp=8",
        "mesh": {"tp": 8},
        "topology": "v6e:2x4",
        "n_devices": 8,
        "n_chips": 8,
    }
    assert (run.path / "hlo" / dump).read_text() == DUMP
    assert [(row.part, row.payload_bytes) for row in run.rows] == [("attn", 2048), ("mlp", 2048)]
    assert "unattributed: none" in out
    assert "prefill: 2 collectives, 7.17 kB on the wire per step; 1 step per request" in out


def test_the_document_of_an_import_has_no_model_and_no_memory(meshscope, dump: str) -> None:
    document = json.loads(meshscope("import", dump, *TP8, "--json").out)
    assert document["source"] == "compiled"
    assert set(document["memory"].values()) == {None}
    # an all-reduce over 8 devices sends 2 x 7/8 of its payload
    figures = {"count": 2, "payload_bytes": 4096, "wire_bytes": 7168}
    assert document["totals"] == {"prefill": figures | {"request": figures}}


def test_two_dumps_are_one_run(meshscope, dump: str) -> None:
    with gzip.open("decode.txt.gz", "wt") as file:
        file.write(DUMP.replace("prefill", "decode"))
    document = json.loads(meshscope("import", dump, "decode.txt.gz", *TP8, "--json").out)
    assert set(document["totals"]) == {"prefill", "decode"}


def test_two_imports_compare(meshscope, dump: str) -> None:
    Path("other.txt").write_text(DUMP.replace("layer0/mlp", "layer1/mlp"))
    for name, text in (("a", dump), ("b", dump), ("c", "other.txt")):
        meshscope("import", text, *TP8, "--out", name)
    equal, different = (meshscope("compare", "a", name).out for name in ("b", "c"))
    assert "\ncollectives: A = B\n" in equal
    assert "\ncollectives: A and B differ\n- prefill: 1 changed (0 B on the wire)\n" in different


def test_the_phase_option_is_for_dumps_that_name_none(meshscope) -> None:
    Path("foreign.txt").write_text(DUMP.replace("prefill/layer0/", ""))
    ask = ("import", "foreign.txt", *TP8, "--json", "--force")
    for options, phases in (((), {"unknown"}), (("--phase", "decode"), {"decode"})):
        document = json.loads(meshscope(*ask, *options).out)
        assert set(document["totals"]) == phases


def test_the_plan_fills_the_slice(meshscope, dump: str) -> None:
    meshscope("import", dump, "--topology", "v6e-8", "--plan", "tp=-1", "--out", "one")
    assert read_run(Path("one")).manifest.experiment.plan == Plan(tp=8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1: is empty"),
        (b"root:x:0:0\n", "got 'root:x:0:0'"),
        (b"\xff\xfe\x00", "is not text"),
        (b"\x1f\x8b\x08cut", "the gzip file is damaged"),
    ],
    ids=["empty", "foreign", "binary", "damaged gzip"],
)
def test_what_is_no_hlo_is_one_message_and_leaves_nothing(meshscope, content, message) -> None:
    Path("dump.txt").write_bytes(content)
    status, out, err = meshscope("import", "dump.txt", *TP8)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("meshscope: dump.txt")
    assert message in err
    assert [path.name for path in Path().iterdir()] == ["dump.txt"]


@table
def test_faults_leave_nothing(meshscope, dump, arguments, message) -> None:
    Path("copy").mkdir()
    copy = str(shutil.copy(dump, "copy"))
    status, out, err = meshscope("import", *(a.format(dump=dump, copy=copy) for a in arguments))
    assert (status, out) == (1, "")
    assert message in err
    assert not Path("runs").exists()


def test_a_cut_off_training_step_is_read_as_far_as_it_goes(meshscope) -> None:
    """The text ends after line 28, in the loop; its scopes are not those of this package."""
    Path("cut.txt").write_text("".join(FOREIGN.read_text().splitlines(keepends=True)[:28]))
    ask = ("import", "cut.txt", "--topology", "v6e:2x2", "--plan", "fsdp=2,tp=2", "--json")
    refused = meshscope(*ask)
    assert (refused.status, refused.out) == (1, "")
    status, out, err = meshscope(*ask, "--partial")
    document = json.loads(out)
    assert status == 0
    assert ":28: the text is cut off after " in err
    assert "The run lacks what followed. The entry computation is among it." in err
    assert [row["axis"] for row in document["collectives"]] == ["fsdp", "tp"]
    assert document["unattributed"]["count"] == document["totals"]["unknown"]["count"] == 2


def test_a_mesh_has_the_axes_of_the_user(meshscope, dump: str) -> None:
    Path(dump).write_text(DUMP.replace("{{0,1,2,3,4,5,6,7}}", "{{0,1,2,3},{4,5,6,7}}"))
    ask = ("import", dump, "--topology", "v6e-8", "--mesh", "data=2,model=4")
    document = json.loads(meshscope(*ask, "--json").out)
    assert [row["axis"] for row in document["collectives"]] == ["model", "model"]
    assert document["experiment"]["mesh"] == {"data": 2, "model": 4}
    assert "plan" not in document["experiment"]
    out = meshscope("show", "runs/prefill-v6e-2x4-data2-model4", "--full").out
    assert "imported program on v6e:2x4 (8 chips), data=2,model=4" in out
    assert "the mesh (data=2, model=4)" in out


def test_devices_are_those_of_the_slice_in_the_order_of_the_mesh(meshscope, dump: str) -> None:
    """vLLM lays the mesh along a ring of v6e-8: the first four positions are one column of chips."""
    Path(dump).write_text(DUMP.replace("{{0,1,2,3,4,5,6,7}}", "{{0,1,2,3},{4,5,6,7}}"))
    ring = "0,2,4,6,7,5,3,1"
    ask = ("import", dump, "--topology", "v6e-8", "--mesh", "data=2,model=4", "--out", "one")
    assert meshscope(*ask, "--device-order", ring).status == 0
    run = read_run(Path("one"))
    assert {(row.axis, row.groups) for row in run.rows} == {("model", ((0, 2, 4, 6), (7, 5, 3, 1)))}
    assert run.manifest.experiment.device_order == (0, 2, 4, 6, 7, 5, 3, 1)


def test_rules_of_the_user_are_kept_with_the_run(meshscope, dump: str) -> None:
    Path(dump).write_text(DUMP.replace("prefill/layer0/mlp", "block_7/feed"))
    Path("mine.toml").write_text(
        "[[rules]]\nop_name = 'block_(?P<layer>\\d+)/feed'\npart = 'mlp'\nphase = 'decode'\n"
    )
    Path(dump).write_text(Path(dump).read_text().replace("prefill/layer0/attn", "block_7/attn"))
    assert meshscope("import", dump, *TP8, "--rules", "mine.toml", "--out", "one").status == 0
    rows = read_run(Path("one")).rows
    assert [(row.phase, row.layer, row.part) for row in rows] == [
        ("decode", 7, "attn"),
        ("decode", 7, "mlp"),
    ]
    assert (Path("one") / "rules.toml").read_text() == Path("mine.toml").read_text()


@table
def test_a_bad_mesh_leaves_nothing(meshscope, dump, options, message) -> None:
    if "a=2,b=2,c=2" in options:
        Path(dump).write_text(DUMP.replace("{{0,1,2,3,4,5,6,7}}", "{{0,1,2},{3,4,5}}"))
    status, out, err = meshscope("import", dump, "--topology", "v6e-8", *options)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert message in err
    assert not Path("runs").exists()


@table
def test_axes_compare_by_the_devices_that_they_group(meshscope, dump, mesh, plan, verdict) -> None:
    groups = "{{0,1,2,3},{4,5,6,7}}"
    if verdict == "different":
        groups = "{{0,2,4,6},{1,3,5,7}}"
        Path("other.txt").write_text(DUMP.replace("{{0,1,2,3,4,5,6,7}}", "{{0,1,2,3},{4,5,6,7}}"))
    Path(dump).write_text(DUMP.replace("{{0,1,2,3,4,5,6,7}}", groups))
    other = "other.txt" if verdict == "different" else dump
    meshscope("import", dump, "--topology", "v6e-8", "--mesh", mesh, "--out", "a")
    meshscope("import", other, "--topology", "v6e-8", "--plan", plan, "--out", "b")
    for left, right in (("a", "b"), ("b", "a")):
        document = json.loads(meshscope("compare", left, right, "--json").out)
        assert document["verdict"] == verdict


CALLS_OUT = (DATA / "calls_pfft3d.hlo.txt").read_text()


@pytest.mark.parametrize("phase", [(), ("--phase", "decode")], ids=["no phase", "decode"])
def test_what_may_communicate_is_said_everywhere(meshscope, phase: tuple[str, ...]) -> None:
    Path("fft.txt").write_text(CALLS_OUT)
    layout = ("--topology", "v6e-16", "--mesh", "x=16", *phase, "--out", "fft")
    said = "1 custom call 'pfft3d' may communicate"

    out = meshscope("import", "fft.txt", *layout).out
    meshscope("import", "fft.txt", *layout[:-1], "fft2")
    document = json.loads(meshscope("show", "fft", "--json").out)
    meshscope("report", "fft", "--out", "fft.html")

    assert said in out
    assert "no collectives" not in out
    compared = meshscope("compare", "fft", "fft2").out
    assert f"A: {said}" in compared
    assert f"B: {said}" in compared
    sides = json.loads(meshscope("compare", "fft", "fft2", "--json").out)
    for side in ("left", "right"):
        assert [other["text"] for other in sides[side]["other_operations"]] == [said]
    assert [other["text"] for other in document["other_operations"]] == [said]
    page = unescape(Path("fft.html").read_text())
    assert said in page
    assert "o collectives" not in page


def test_plots_that_are_not_drawn_say_what_may_communicate(meshscope) -> None:
    pytest.importorskip("vl_convert", reason="needs the extra plots")
    Path("fft.txt").write_text(CALLS_OUT)
    meshscope("import", "fft.txt", "--topology", "v6e-16", "--mesh", "x=16", "--out", "fft")
    answer = "".join(map(str, meshscope("export", "fft", "--to", "plots", "--out", "plots")))
    for name in ("volume", "sizes", "matrix", "intervals"):
        assert f"no {name}: no collective is known: 1 custom call 'pfft3d' may" in answer
    assert "the run has no collectives" not in answer


SENDS_UNKNOWN = (DATA / "sends_unknown_bytes.hlo.txt").read_text()
SENDS_ANYWHERE = (DATA / "sends_to_unknown_devices.hlo.txt").read_text()


@pytest.mark.parametrize(
    ("text", "sent", "n_bytes"),
    [(SENDS_UNKNOWN, "bytes unknown", None), (SENDS_ANYWHERE, "16.4 kB on the wire", 64 * 64 * 4)],
    ids=["bytes", "devices"],
)
def test_what_a_collective_does_not_state_is_never_zero(meshscope, text, sent, n_bytes) -> None:
    Path("k.txt").write_text(text)
    layout = ("--topology", "v6e:2x2", "--mesh", "x=4", "--phase", "decode", "--out", "k")

    out = " ".join(meshscope("import", "k.txt", *layout).out.split())
    document = json.loads(meshscope("show", "k", "--json").out)

    assert f"decode: 1 collective, {sent} per step" in out
    is_timed = n_bytes is not None  # the kernel is the whole program
    lacks = "no interval: the times lack 1 collective of unknown bytes or devices"
    assert (lacks if is_timed else "TPOT, decode unknown") in out
    assert (document["time"]["tpot_s"] is not None) is is_timed
    total = document["totals"]["decode"]
    assert (total["count"], total["payload_bytes"], total["wire_bytes"]) == (1, n_bytes, n_bytes)
    assert document["unattributed"]["payload_bytes"] == n_bytes
    assert document["time"].get("intervals") == ({"tpot_s": [None, None]} if is_timed else None)
    assert meshscope("report", "k", "--out", "k.html").status == 0
    assert meshscope("export", "k", "--to", "ccl-bench", "--out", "ccl").status == 0


def test_a_program_without_phase_has_no_collectives_either(meshscope) -> None:
    Path("fft.txt").write_text(CALLS_OUT.replace("pfft3d", "TopK"))
    layout = ("--topology", "v6e-16", "--mesh", "x=16", "--out", "fft")
    assert "no collectives" in meshscope("import", "fft.txt", *layout).out


def test_only_a_program_that_is_known_has_no_collectives(meshscope) -> None:
    Path("fft.txt").write_text(CALLS_OUT.replace("pfft3d", "TopK"))
    layout = ("--topology", "v6e-16", "--mesh", "x=16", "--phase", "decode", "--out", "fft")
    assert "no collectives" in meshscope("import", "fft.txt", *layout).out
    assert json.loads(meshscope("show", "fft", "--json").out)["other_operations"] == []


def test_what_may_communicate_keeps_no_limit_on_collectives(meshscope) -> None:
    Path("fft.txt").write_text(CALLS_OUT)
    layout = ("--topology", "v6e-16", "--mesh", "x=16", "--phase", "decode", "--out", "fft")
    run = read_run(Path("fft")) if meshscope("import", "fft.txt", *layout).status == 0 else None
    assert run is not None
    names = ("count", "max_wire_bytes", "min_count")
    limits = tuple(replace(LIMITS[name], value=0) for name in names)

    checks = checks_of(run, [Budget(of=Filter(), limits=limits)])

    assert [(check.value, check.is_kept) for check in checks] == [
        (None, False),
        (None, False),
        (0, True),
    ]
    assert sentence(checks[0]) == (
        "collectives: count unknown (1 custom call 'pfft3d' may communicate), exactly 0"
    )


NAMES = (
    *("ep=8", "expert=8", "sp=8", "cp=8", "pp=8", "dcp=8", "model=8", "data=8", "fsdp=8", "dp=8"),
    *("tensor=8", "tp=8", "x=8", "x=2,y=4", "ep=2,tp=4", "ep=4,sp=2", "dp=2,data=4", "pp=2,cp=4"),
    *("expert=2,model=4", "context=2,stage=4", "ep=2,fsdp=4", "sequence_parallel=8"),
)
STEP = DUMP.replace("prefill/layer0/", "")


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


def test_a_mesh_of_the_user_has_the_sizes_that_its_names_say_in_a_card(meshscope) -> None:
    Path("step.txt").write_text(STEP)
    layout = ("--topology", "v6e-8", "--mesh", "expert=2,model=4", "--phase", "step")
    meshscope("import", "step.txt", *layout, "--out", "run")
    sizes = card_of(read_run(Path("run")))["Model-executor"]["model_plan_parallelization"]
    of_data = {"dp_replicate": 1, "dp_shard": 1}
    assert sizes == {**of_data, "tp": 4, "pp": 1, "cp": 1, "ep": 2, "pp_mb": 1}


def test_groups_that_are_parts_of_an_axis_count_for_it(meshscope) -> None:
    Path("step.txt").write_text(STEP.replace("{{0,1,2,3,4,5,6,7}}", "{{0,2,4,6},{1,3,5,7}}"))
    layout = ("--topology", "v6e-8", "--mesh", "x=8", "--phase", "step", "--out", "run")
    result = meshscope("import", "step.txt", *layout)
    assert result.status == 0
    assert "  subsets of x  " in result.out
    assert "groups of 4 devices are subsets of x" in meshscope("show", "run", "--full").out
    run = read_run(Path("run"))
    assert [(row.axis, row.group_size) for row in run.rows] == [("x", 4)] * 2
    assert "unattributed" not in result.out
    document = json.loads(meshscope("show", "run", "--json").out)
    assert document["unattributed"]["count"] == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (gzip.compress(b""), "is empty"),
        (b"\x1f\x8b" + bytes(20), "the gzip file is damaged"),
        (b"Obj\x01avro", "expected a line 'HloModule NAME, ...', got 'Obj"),
        (bytes(range(256)), "is not text"),
        (pickle.dumps([1], 0), "expected a line 'HloModule NAME, ...', got '(lp0'"),
    ],
    ids=["empty", "empty inside gzip", "damaged gzip", "binary", "random bytes", "old pickle"],
)
def test_a_file_of_no_known_kind_is_named_before_options_are_asked_for(
    meshscope, tmp_path, content, words
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    status, _, err = meshscope("import", str(path))
    assert status == 1
    assert words in err
    assert "--topology" not in err
